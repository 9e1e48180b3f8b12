"""Generates text token by token over the stages: first the prompts, then each new token. Layers keep what they need of earlier tokens.

rank 0   F(0)          F(1)             pass k: this rank's stages run the new tokens of all samples
rank 1        F(0)→t0       F(1)→t1     the last stage's rank chooses the next tokens, and sends them to all ranks
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.comm.forms import Form
from pipetrain.comm.transport import Transport
from pipetrain.plan.plan import Plan, whole_number
from pipetrain.runtime.arguments import checked_seed
from pipetrain.runtime.assembly import Assembly
from pipetrain.runtime.cut import is_number
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.program import Program
from pipetrain.schedule.op import Op
from pipetrain.stage.past import Past, goes_on
from pipetrain.stage.seeding import mix

Choose = Callable[[Tensor], Tensor]  # logits [samples, vocabulary] -> ids [samples]
OnToken = Callable[[int, int], bool | None]  # number of the sample, token -> whether the sample ends
_GENERATOR_SEEDS = (1 << 63) - 1  # the bits of a seed that a generator takes


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen from the logits.

    See `Pipeline.generate`. top_p is applied after top_k, and leaves at least one token (Holtzman et al., "The curious case of neural text
    degeneration", 2020, section 3.1). A draw depends only on the seed, the number of the sample and the number of the token.

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

    def draw(self, logits: Tensor, token: int) -> Tensor:
        """Draw token number `token` of each sample, by logits `[samples, vocabulary]` on the host. Returns ids `[samples]`, int64."""
        drawn = []
        for sample, chances in enumerate(self.chances(logits)):
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
    """Prompts, and how to continue them. `context`: the most tokens of a sample that layers see; None: no limit. The first pass takes at
    most the last `context` tokens. When layers have seen so many, they start anew with the last `context // 2`."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    ends: Sequence[int] = ()  # tokens after which a sample has ended
    context: int | None = None

    @staticmethod
    def of(prompts: Any, max_new_tokens: Any, sampling: Sampling, eos: Any, context: Any) -> Request:
        """The request of these arguments of `Pipeline.generate`. Raises ValueError: one of them is invalid."""
        rows = _prompts_of(prompts)
        context = None if context is None else whole_number("context", context, least=2)
        ends = _ids([] if eos is None else eos if isinstance(eos, (Sequence, Tensor)) else [eos], "eos")
        return Request(rows, whole_number("max_new_tokens", max_new_tokens), sampling, ends, context)


def agree(make: Callable[[], Request] | None, layers: Mapping[int, nn.Module], chain: Chain) -> Request:
    """Send the request that `make` returns on the first stage's rank to every rank. On other ranks `make` is None. Collective.

    Raises ValueError, the same on every rank: the request is invalid, or a layer cannot continue from earlier tokens; PipelineError:
    another rank failed, or called something else.
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
        chain.wait_sent(what)  # this process may exit with the error before the others have it
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
    """Return the rows of a tokenizer's output, without padding."""
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


class Continuations:
    """The tokens of the samples so far, and what the layers of this rank keep of them."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.num_new = 0
        self.past = Past([0], device)  # replaced in the first pass
        self.made: list[list[int]] = [[] for _ in request.prompts]  # the new tokens of each sample, up to its end
        self._rows = list(map(list, request.prompts))  # all tokens, also those after an end
        self._open = [True] * len(request.prompts)
        self._request = request
        self._device = device

    @property
    def is_over(self) -> bool:
        return not any(self._open)

    def begin(self) -> Tensor:
        """Return the tokens of the next pass, `[rows, new]`, int64: the last token of each sample. In the first pass, and if the context is
        full, layers start anew with the latest tokens of each sample; shorter samples are padded in front."""
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

    def take(self, chosen: bytes, on_token: OnToken | None) -> bytes:
        """Record each sample's next token. Returns a byte per sample: 1 if it continues. A token after the end is not in the text."""
        self.num_new += 1
        for row, token in enumerate(torch.frombuffer(bytearray(chosen), dtype=torch.int64).tolist()):
            self._rows[row].append(token)
            if self._open[row]:
                self.made[row].append(token)
                self._open[row] = token not in self._request.ends and self.num_new < self._request.max_new_tokens
                if on_token is not None and on_token(row, token):
                    self._open[row] = False
        return bytes(self._open)


@dataclass
class Generation:
    """One call of `Pipeline.generate` on one rank; all ranks have agreed on `request`. `program` runs the forward of one microbatch.
    `choose` replaces the sampling on the last stage's rank."""

    request: Request
    plan: Plan
    program: Program
    executor: Executor
    transport: Transport
    parts: Assembly
    choose: Choose | None
    on_token: OnToken | None

    def __post_init__(self) -> None:
        self._samples = Continuations(self.request, self.parts.group.device)
        self._forms: dict[tuple[int, ...], dict[Op, Form]] = {}  # by the shape of the tokens

    def run(self) -> list[Tensor]:
        """Return the new tokens of each prompt, int64, on every rank. Collective. Raises PipelineError: another rank failed. Raises
        ValueError: `on_token` differs between ranks. Also raises what a layer of this rank raises."""
        samples, last, rows = self._samples, self.plan.stage_ranks[-1], len(self.request.prompts)
        while not samples.is_over:
            what, chosen = f"token {samples.num_new}", self._pass_through()
            message = chosen and chosen + samples.take(chosen, self.on_token)
            message = self.parts.group.chain.broadcast(message, last, what)
            tokens, going_on = message[:-rows], message[-rows:]
            if not chosen and samples.take(tokens, self.on_token) != going_on:
                raise ValueError(f"on_token ended other texts on rank {last} at {what}: return the same on every rank")
        return [torch.tensor(tokens) for tokens in samples.made]

    def _pass_through(self) -> bytes:
        """Run the tokens of one pass through this rank's stages. Returns the chosen tokens on the last stage's rank, no bytes elsewhere."""
        samples = self._samples
        tokens = samples.begin()
        self.executor.prepare(samples.past)
        # No layer draws random numbers, so the seed does not matter.
        step = Step(samples.num_new, 0, with_graph=False, with_loss=False, microbatches=[tokens], past=samples.past)
        described = tuple(tokens.shape) not in self._forms
        forms = self._forms.setdefault(tuple(tokens.shape), {})
        self.transport.start_step(forms, described=(described, described))
        self.executor.run(self.program, step)
        samples.past.end()
        return self._chosen(step.outputs[0][:, -1]) if step.outputs else b""

    def _chosen(self, logits: Tensor) -> bytes:
        number, sampling, fetch = self._samples.num_new, self.request.sampling, self.parts.fetch
        what = f"the logits of token {number}"
        if self.choose is not None:
            chosen = fetch(self.choose(logits.clone()), what)  # a copy, because `choose` may change it
        elif sampling.temperature == 0.0:
            chosen = fetch(logits.argmax(-1), what)  # on the device: copying all logits takes longer
        else:
            chosen = sampling.draw(fetch(logits.clone(), what), number)
        return chosen.to(torch.int64).numpy().tobytes()
