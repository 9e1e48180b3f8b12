"""Text, token by token, over the stages: the prompts first, then each new token, going on from what the layers have kept.

    rank 0   F(0) F(1)          F(2) F(3)         turn k: all new tokens of group k mod 2 through this rank's stages
    rank 1        F(0)→t0 F(1)→t1     F(2)→t2     the last stage's rank chooses; its token goes up the chain of ranks, and each knows it

Samples are cut into groups, which follow each other: while one's token is on its way back, the stages work on the next. A rank
begins a turn when it knows the group's previous tokens. Tokens of at most `_lag` turns, of other groups, may still be on their way.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.comm.device import Fetch
from pipetrain.comm.forms import Form
from pipetrain.comm.transport import Transport
from pipetrain.plan.plan import Plan, whole_number
from pipetrain.runtime.arguments import checked_seed, is_number
from pipetrain.runtime.cut import row_counts
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.program import Program
from pipetrain.schedule.op import Op
from pipetrain.stage.past import Past, goes_on
from pipetrain.stage.seeding import mix

Choose = Callable[[Tensor], Tensor]
OnToken = Callable[[int, int], None]
_GENERATOR_SEEDS = (1 << 63) - 1  # the bits of a seed that a generator takes


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen by their logits.

    temperature: 0 takes the likeliest token each time; else the logits are divided by it, and a token is drawn by their softmax.
    top_k: draws from the k likeliest tokens; None: from all.
    top_p: draws from the likeliest tokens that have this share of the probability together, at least one (Holtzman et al., "The curious
        case of neural text degeneration", 2020, section 3.1); None: from all. Where both are given, top_k is applied first.
    seed: a draw depends on this, the number of the sample and the number of the token alone.

    Raises ValueError: a number out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r}: allowed is 0 (the likeliest token each time) or more")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r}: allowed is a whole number from 1 on, or None for all tokens")
        if self.top_p is not None and (not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p={self.top_p!r}: allowed is more than 0 and at most 1, or None for all tokens")
        checked_seed(self.seed)
        if self.temperature == 0.0 and (self.top_k or self.top_p):
            raise ValueError(
                f"temperature=0 takes the likeliest token each time, so that top_k={self.top_k} top_p={self.top_p} do nothing: leave "
                "them out, or set a temperature"
            )

    def draw(self, logits: Tensor, samples: range, token: int) -> Tensor:
        """Token ids `[rows]`, int64, by logits `[rows, vocabulary]` on the host: row i is token number `token` of sample `samples[i]`."""
        drawn = []
        for chances, sample in zip(self.chances(logits), samples):
            generator = torch.Generator().manual_seed(mix(self.seed, sample, token) & _GENERATOR_SEEDS)
            drawn.append(torch.multinomial(chances, 1, generator=generator).squeeze(0))
        return torch.stack(drawn)

    def chances(self, logits: Tensor) -> Tensor:
        """The probabilities `[rows, vocabulary]` by which a token is drawn, float32."""
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if self.top_p is not None:
            ordered, places = scaled.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
            before[..., 0] = 0.0
            outside = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, places, before >= self.top_p)
            scaled = scaled.masked_fill(outside, -math.inf)
        return scaled.softmax(-1)


@dataclass(frozen=True)
class Request:
    """Prompts, and how to continue them. `context`: the most tokens of a sample that layers see; a longer sample continues from the latter
    half of them. None: no limit."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    ends: Sequence[int] = ()  # tokens after which a sample has ended
    context: int | None = None
    num_groups: int = 1

    @staticmethod
    def of(prompts: Any, max_new_tokens: Any, sampling: Sampling, eos: Any, context: Any, num_groups: Any) -> Request:
        """Raises ValueError: an argument of `Pipeline.generate` from which no text can be made."""
        rows, groups = _prompts_of(prompts), whole_number("num_groups", num_groups)
        if groups > len(rows):
            raise ValueError(f"num_groups={groups}: there are {len(rows)} prompts, and each group needs one")
        context = None if context is None else whole_number("context", context, least=2)
        ends = _ids([] if eos is None else eos if isinstance(eos, (Sequence, Tensor)) else [eos], "eos")
        return Request(rows, whole_number("max_new_tokens", max_new_tokens), sampling, ends, context, groups)


def agree(make: Callable[[], Request] | None, layers: Mapping[int, nn.Module], chain: Chain) -> Request:
    """What the rank that holds the first stage was asked for (`make`, None elsewhere), on every rank. Collective.

    Raises ValueError: what is wrong with it, or the first layer of a rank that cannot make text; the same on every rank; PipelineError: another
    rank failed, or called something else.
    """
    own: dict[str, Any] = {"problem": "", "request": None}
    lacking = next((number for number, layer in layers.items() if not goes_on(layer)), None)
    try:
        if lacking is not None:
            raise ValueError(
                f"layer {lacking} ({type(layers[lacking]).__name__}) cannot continue from earlier tokens: give it "
                "forward_cached(value, past) beside forward, as pipetrain.stage.past says"
            )
        own["request"] = None if make is None else asdict(make())
    except (ValueError, TypeError) as error:
        own["problem"] = str(error)
    what = "what is generated"
    parts = [json.loads(part) for part in chain.concatenate(json.dumps(own).encode(), what)]
    if problem := next((part["problem"] for part in parts if part["problem"]), None):
        chain.wait_sent(what)  # this rank may end with the error, and the others are to know it
        raise ValueError(problem)
    found = next(part["request"] for part in parts if part["request"])
    return Request(**{**found, "sampling": Sampling(**found["sampling"])})


def _prompts_of(tokens: Any) -> list[list[int]]:
    if tokens is None:
        raise ValueError("generate was given no prompts on the rank that holds the first stage: give token ids there")
    if isinstance(tokens, Mapping):
        tokens = _unpadded(tokens)
    if isinstance(tokens, Tensor):
        tokens = [tokens] if tokens.dim() == 1 else list(tokens)
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
        raise ValueError(
            f"prompts is a {type(tokens).__name__}: give a list of prompts, each a list or a tensor of token ids, a tensor [prompts, tokens], "
            "or a dict with input_ids and attention_mask"
        )
    if tokens and isinstance(tokens[0], Integral):
        tokens = [tokens]
    rows = [_ids(row, f"prompts[{index}]") for index, row in enumerate(tokens)]
    if not rows or not all(rows):
        what = f"prompts[{rows.index([])}]" if rows else "prompts"
        raise ValueError(f"{what} is empty: generation starts from at least one token")
    return rows


def _unpadded(batch: Mapping[str, Any]) -> list[Tensor]:
    """The rows of what a tokenizer gives, without padding."""
    unknown = sorted(set(batch) - {"input_ids", "attention_mask", "token_type_ids"})
    ids = batch.get("input_ids")
    if unknown or not isinstance(ids, Tensor):
        raise ValueError(
            f"prompts has the keys {sorted(batch)}: a dict needs input_ids, a tensor, and may have attention_mask"
        )
    mask = batch.get("attention_mask", torch.ones_like(ids))
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or ids.dim() != 2:
        raise ValueError("prompts: input_ids and attention_mask need the same shape [prompts, tokens]")
    return [row[seen.bool()] for row, seen in zip(ids, mask)]


def _ids(row: Any, what: str) -> list[int]:
    try:
        ids = torch.as_tensor(row if isinstance(row, Tensor) or not len(row) else list(row))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is a {type(row).__name__}: a list or a tensor of token ids is needed") from None
    if not ids.numel():
        return []
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ValueError(
            f"{what} is a tensor {list(ids.shape)} of {ids.dtype}: token ids are whole numbers in one dimension"
        )
    found: list[int] = ids.tolist()
    if min(found) < 0:
        raise ValueError(f"{what} has {min(found)}: a token id is a whole number from 0 on")
    return found


class SampleGroup:
    """Samples that go through the stages together: what they had so far, and what the layers of this rank have kept of it."""

    def __init__(self, request: Request, samples: range, device: torch.device) -> None:
        self.samples = samples
        self.num_new = 0
        self.past = Past([0], device)  # until the first turn
        self.made: list[list[int]] = [[] for _ in samples]  # the new tokens of each, up to its end
        self._rows = [list(request.prompts[sample]) for sample in samples]  # all tokens, also behind an end
        self._open = [True] * len(samples)
        self._request = request
        self._device = device

    @property
    def is_over(self) -> bool:
        return not any(self._open)

    def begin(self) -> Tensor:
        """The new tokens of this turn, `[rows, new]`, int64: the one that each sample got last; or, with nothing kept, the latest
        tokens of all, shorter samples padded in front."""
        limit = self._request.context
        if self.num_new and (limit is None or self.past.length < limit):
            self.past.begin(1)
            return torch.tensor([[row[-1]] for row in self._rows], device=self._device)
        most = None if limit is None else limit // 2 if self.num_new else limit
        rows = [row if most is None else row[-most:] for row in self._rows]
        length = max(map(len, rows))
        self.past = Past([length - len(row) for row in rows], self._device)
        self.past.begin(length)
        return torch.tensor([[0] * (length - len(row)) + row for row in rows], device=self._device)

    def take(self, tokens: Sequence[int], on_token: OnToken | None) -> None:
        """Each sample's next token; of a sample that has ended it is nothing."""
        self.num_new += 1
        for row, token in enumerate(tokens):
            self._rows[row].append(token)
            if self._open[row]:
                self.made[row].append(token)
                self._open[row] = token not in self._request.ends and self.num_new < self._request.max_new_tokens
                if on_token is not None:
                    on_token(self.samples[row], token)


_Turn = tuple[
    SampleGroup, bytes
]  # a pass of a group through the stages, and on the last stage's rank the tokens that were chosen


@dataclass
class Generation:
    """One call of `Pipeline.generate` on one rank; all ranks have agreed on `request`.

    `program` is that of one microbatch's forward. `choose` stands in for the sampling, on the rank that holds the last stage.
    """

    request: Request
    plan: Plan
    chain: Chain
    program: Program
    executor: Executor
    transport: Transport
    fetch: Fetch
    device: torch.device
    choose: Choose | None
    on_token: OnToken | None

    def __post_init__(self) -> None:
        ends = list(itertools.accumulate(row_counts(len(self.request.prompts), self.request.num_groups)))
        samples = [range(start, end) for start, end in zip([0, *ends], ends)]
        self._groups = [SampleGroup(self.request, own, self.device) for own in samples]
        # How many turns this rank may be ahead of the tokens that it knows: where each rank has one stage, in order, as many as there are
        # ranks behind it, as its turns come so much earlier. Every rank learns all tokens in one order, and a token needs no turn that
        # comes after it, so nobody waits in a ring. With any other placement a rank may have work before and after another's in one turn:
        # there turns do not overlap.
        in_order = self.plan.stage_ranks == tuple(range(self.plan.num_stages))
        self._lag = self.plan.num_stages - 1 - self.chain.rank if in_order else 0
        self._forms: dict[tuple[int, ...], dict[Op, Form]] = {}  # by the shape of the tokens

    def run(self) -> list[Tensor]:
        """The new tokens of each prompt, int64, on every rank. Collective.

        Raises PipelineError: another rank failed. What a layer of this rank raises.
        """
        unknown: deque[_Turn] = deque()  # whose tokens this rank does not know yet
        for group in itertools.cycle(self._groups):
            while any(waiting is group for waiting, _ in unknown):
                self._learn(*unknown.popleft())
            if not group.is_over:
                unknown.append(self._pass_through(group))
                while len(unknown) > self._lag:
                    self._learn(*unknown.popleft())
            elif all(other.is_over for other in self._groups):
                break
        return [torch.tensor(tokens) for group in self._groups for tokens in group.made]

    def _pass_through(self, group: SampleGroup) -> _Turn:
        """The new tokens of a group through the stages of this rank."""
        tokens = group.begin()
        self.executor.prepare(group.past)
        # Nothing draws: no seed.
        step = Step(group.num_new, 0, with_graph=False, with_loss=False, microbatches=[tokens], past=group.past)
        described = tuple(tokens.shape) not in self._forms
        forms = self._forms.setdefault(tuple(tokens.shape), {})
        self.transport.start_step(forms, described=(described, described))
        self.executor.run(self.program, step)
        group.past.end()
        return group, self._chosen(group, step.outputs[0]) if step.outputs else b""

    def _chosen(self, group: SampleGroup, output: Tensor) -> bytes:
        logits, sampling = output[:, -1], self.request.sampling
        what = f"the logits of token {group.num_new}"
        if self.choose is not None:
            chosen = self.fetch(self.choose(logits.clone()), what)  # theirs, and not of inference mode
        elif sampling.temperature == 0.0:
            chosen = self.fetch(logits.argmax(-1), what)  # where the logits are: a vocabulary is long
        else:
            chosen = sampling.draw(self.fetch(logits.clone(), what), group.samples, group.num_new)
        return chosen.to(torch.int64).numpy().tobytes()

    def _learn(self, group: SampleGroup, chosen: bytes) -> None:
        """The tokens that were chosen in a turn."""
        what = f"token {group.num_new} of prompt {group.samples.start}"
        chosen = self.chain.broadcast(chosen, self.plan.stage_ranks[-1], what)
        group.take(torch.frombuffer(bytearray(chosen), dtype=torch.int64).tolist(), self.on_token)
