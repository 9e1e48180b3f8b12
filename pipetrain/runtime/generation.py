"""Text, token by token, over the stages: the prompts first, then each new token, going on from what the layers have kept.

    rank 0   F(0) F(1)          F(2) F(3)         turn k: all new tokens of group k mod 2 through this rank's stages
    rank 1        F(0)→t0 F(1)→t1     F(2)→t2     the last stage's rank chooses; its token goes up the chain of ranks, and each knows it

Samples are cut into groups, which follow each other: while one's token is on its way back, the stages work on the next. A rank
begins turn k when it knows the token of the same group's turn before, and not sooner than it must wait for others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipetrain.group.chain import Chain
from pipetrain.plan.plan import Plan
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.program import Program
from pipetrain.runtime.prompts import Prompts
from pipetrain.schedule.op import Op
from pipetrain.stage.past import Past
from pipetrain.transport.forms import Form
from pipetrain.transport.transport import Transport

Choose = Callable[[Tensor], Tensor]
OnToken = Callable[[int, int], None]
Fetch = Callable[[Tensor, str], Tensor]


class _Turn(NamedTuple):
    """One pass of a group through the stages, whose tokens this rank does not know yet."""

    group: SampleGroup
    chosen: bytes  # on the last stage's rank


class SampleGroup:
    """Samples that go through the stages together: what they had so far, and what the layers of this rank have kept of it."""

    def __init__(self, prompts: Prompts, samples: range, device: torch.device) -> None:
        self.samples = samples
        self.num_new = 0
        self.past = Past([0], device)  # until the first turn
        self._rows = [list(prompts.tokens[sample]) for sample in samples]
        self._lengths = [len(row) for row in self._rows]  # where a sample ended, without what followed
        self._starts = list(self._lengths)
        self._open = [True] * len(samples)
        self._prompts = prompts
        self._device = device

    @property
    def is_over(self) -> bool:
        return not any(self._open)

    def begin(self) -> Tensor:
        """The new tokens of this turn, `[rows, new]`, int64: those of the prompts, or the one that each sample got last."""
        limit = self._prompts.context
        if self.num_new == 0:
            return self._begin_anew(limit)
        if limit is not None and self.past.length >= limit:
            return self._begin_anew(limit // 2)
        self.past.begin(1)
        return torch.tensor([[row[-1]] for row in self._rows], device=self._device)

    def _begin_anew(self, most: int | None) -> Tensor:
        """With nothing kept, from the latest `most` tokens, shorter samples padded in front."""
        rows = [row if most is None else row[-most:] for row in self._rows]
        length = max(map(len, rows))
        self.past = Past([length - len(row) for row in rows], self._device)
        self.past.begin(length)
        return torch.tensor([[0] * (length - len(row)) + row for row in rows], device=self._device)

    def take(self, tokens: Sequence[int], on_token: OnToken | None) -> None:
        """Each sample's next token; of a sample that has ended it is nothing."""
        self.num_new += 1
        for number, token in enumerate(tokens):
            self._rows[number].append(token)
            if not self._open[number]:
                continue
            self._lengths[number] += 1
            self._open[number] = token not in self._prompts.ends and self.num_new < self._prompts.max_new_tokens
            if on_token is not None:
                on_token(self.samples[number], token)

    def made(self) -> list[Tensor]:
        """The new tokens of each sample."""
        return [torch.tensor(row[start:end]) for row, start, end in zip(self._rows, self._starts, self._lengths)]


class Generation:
    """One call of `Pipeline.generate` on one rank; all ranks have agreed on `prompts`.

    `program` is that of one microbatch's forward. `choose` stands in for the sampling, on the rank that holds the last stage.
    """

    def __init__(
        self,
        prompts: Prompts,
        plan: Plan,
        chain: Chain,
        program: Program,
        executor: Executor,
        transport: Transport,
        fetch: Fetch,
        device: torch.device,
        *,
        choose: Choose | None,
        on_token: OnToken | None,
    ) -> None:
        self._prompts = prompts
        self._chain = chain
        self._program = program
        self._executor = executor
        self._transport = transport
        self._fetch = fetch
        self._choose = choose
        self._on_token = on_token
        self._num_layers = plan.num_layers
        self._last_rank = plan.stage_ranks[-1]
        self._groups = [
            SampleGroup(prompts, samples, device) for samples in _cut(len(prompts.tokens), prompts.num_groups)
        ]
        self._lag = _lag(plan, chain.rank)
        self._forms: dict[tuple[int, int], dict[Op, Form]] = {}  # by the shape of the tokens

    def run(self) -> list[Tensor]:
        """The new tokens of each prompt, int64, on every rank. Collective.

        Raises:
            PipelineError: another rank failed. What a layer of this rank raises.
        """
        unknown: deque[_Turn] = deque()
        for group in itertools.cycle(self._groups):
            while any(turn.group is group for turn in unknown):
                self._learn(unknown.popleft())
            if not group.is_over:
                unknown.append(self._pass_through(group))
                while len(unknown) > self._lag:
                    self._learn(unknown.popleft())
            elif all(other.is_over for other in self._groups):
                break
        return [tokens for group in self._groups for tokens in group.made()]

    def _pass_through(self, group: SampleGroup) -> _Turn:
        """The new tokens of a group through the stages of this rank."""
        tokens = group.begin()
        self._executor.prepare(group.past)
        step = Step(
            group.num_new,
            seed=0,  # nothing draws
            num_layers=self._num_layers,
            with_graph=False,
            with_loss=False,
            microbatches=[tokens],
            past=group.past,
        )
        shape = (tokens.shape[0], tokens.shape[1])
        described = shape not in self._forms
        self._transport.start_step(self._forms.setdefault(shape, {}), described=(described, described))
        self._executor.run(self._program, step)
        group.past.end()
        return _Turn(group, self._chosen(group, step.outputs[0]) if step.outputs else b"")

    def _chosen(self, group: SampleGroup, output: Tensor) -> bytes:
        logits, sampling = output[:, -1], self._prompts.sampling
        what = f"the logits of token {group.num_new}"
        if self._choose is not None:
            chosen = self._fetch(self._choose(logits.clone()), what)  # theirs, and not of inference mode
        elif sampling.is_greedy:
            chosen = self._fetch(logits.argmax(-1), what)  # where the logits are: a vocabulary is long
        else:
            chosen = sampling.choose(self._fetch(logits.clone(), what), group.samples, group.num_new)
        return chosen.to(torch.int64).numpy().tobytes()

    def _learn(self, turn: _Turn) -> None:
        """The tokens that were chosen in a turn."""
        group = turn.group
        what = f"token {group.num_new} of prompt {group.samples.start}"
        chosen = self._chain.broadcast(turn.chosen, self._last_rank, what)
        group.take(torch.frombuffer(bytearray(chosen), dtype=torch.int64).tolist(), self._on_token)


def _cut(num_prompts: int, num_groups: int) -> list[range]:
    """Neighbouring prompts, as many in each group as can be, and one more in the first ones."""
    share, rest = divmod(num_prompts, num_groups)
    ends = list(itertools.accumulate(share + (number < rest) for number in range(num_groups)))
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _lag(plan: Plan, rank: int) -> int:
    """How many turns a rank may be ahead of the tokens that it knows.

    Where each rank has one stage, in order, as many as there are ranks behind it: its turns come so much earlier. Every rank learns all
    tokens in one order, and a token needs no turn that comes after it, so nobody waits in a ring. With any other placement a rank may
    have work before and after another's in one turn: there turns do not overlap.
    """
    in_order = plan.stage_ranks == tuple(range(plan.num_stages))
    return plan.num_stages - 1 - rank if in_order else 0
