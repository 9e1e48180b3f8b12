"""The same layers as a pipeline and as the plain loop: some steps with an optimizer, compared bit for bit.

What comes of it is one of five: the numbers are equal; they are, with a layer that is not recomputed; an error names the
layer; the numbers differ; or the error names nobody. The last two are defects.
"""

from __future__ import annotations

import enum
import multiprocessing as mp
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipetrain.plan.balance import balance_evenly
from pipetrain.plan.plan import Plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.stage.stage import LossFn

Batch = tuple[Any, Any]
Trace = dict[str, Any]  # what it is -> its value, in the order in which it came to be

SEED = 3
NUM_STEPS = 3
NUM_MICROBATCHES = 3

# What says which layer, leaf or argument is meant.
_NAMES_SOMETHING = re.compile(r"layers? \d+|stage \d+|loss_fn|count_fn|inputs|targets|parameter|buffer", re.IGNORECASE)
# Never meant for a user, whatever they say.
_RAW = (AssertionError, AttributeError, LookupError, NameError, RecursionError, ArithmeticError, NotImplementedError)
_NOT_RECOMPUTED = re.compile(r"gradient inside|not recomputed|kept from F to B")

START_METHOD: Final = "forkserver"
# A first optimizer, and a first backward, load what torch.compile needs.
_LOADED = ["torch", "torch._dynamo", "pipetrain.runtime.pipeline"]


def forking() -> ForkServerContext:
    """The context of new processes: forked from one that has loaded torch, which takes seconds, but has not touched CUDA."""
    context = mp.get_context(START_METHOD)
    context.set_forkserver_preload(_LOADED)
    return context


class Verdict(enum.StrEnum):
    """What came of one way to run, or of several: the worst, which is the last of these."""

    EQUAL = "equal"
    KEPT = "kept"  # equal; a layer's set is kept and not recomputed
    REFUSED = "refused"  # with an error that names the layer
    DIFFERS = "differs"  # a defect
    FAILED = "failed"  # a defect: a raw error, or no end


@dataclass(frozen=True)
class Found:
    """What came of it. `detail` is the refusal, what differs, the raw error, or which layer is kept; `kept` says that of each
    kept layer, whatever the result."""

    result: Verdict
    detail: str = ""
    kept: tuple[str, ...] = ()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """0-dim."""
    return ((output - target) ** 2).mean()


@dataclass(frozen=True)
class Subject:
    """What is trained. `layers` and `loss` make new ones for each run, after a seed; `batch` gives that of a step.

    `num_microbatches` are those of all replicas. `before_step(step, layers)` may change them (freeze one, say). `look(layers)` is compared at the end besides gradients,
    buffers and parameters. Gradients are clipped by `max_norm` in each step; None: not.
    """

    layers: Callable[[], Sequence[nn.Module]]
    batch: Callable[[int], Batch]
    loss: Callable[[], LossFn] = lambda: mean_square
    count_fn: Callable[[Any], int | float] | None = None
    before_step: Callable[[int, Sequence[nn.Module]], None] = lambda _step, _layers: None
    look: Callable[[Sequence[nn.Module]], Any] | None = None
    max_norm: float | None = 1.0
    num_microbatches: int = NUM_MICROBATCHES
    num_steps: int = NUM_STEPS


@dataclass(frozen=True)
class Way:
    """One way to run layers as a pipeline: with more than one rank a stage on each, else all on one."""

    mode: str
    num_stages: int
    num_ranks: int = 1
    schedule: Any = field(default="gpipe", compare=False)  # what `Pipeline(schedule=...)` takes
    balance: tuple[int, ...] | None = None  # default: as equal as can be
    policy: Mapping[str, Any] = field(default_factory=dict)  # of `RecomputePolicy`, besides the mode
    plan: Plan | None = field(default=None, compare=False)  # in place of stages, ranks and balance

    def __str__(self) -> str:
        stages = f"{self.num_stages} stage{'s' if self.num_stages > 1 else ''}"
        return f"{self.mode}, {stages}{f' on {self.num_ranks} ranks' if self.num_ranks > 1 else ''}"

    def options(self, num_layers: int) -> dict[str, Any]:
        """The arguments of `Pipeline`. The last stage recomputes as the others do."""
        balance = self.balance or balance_evenly(num_layers, self.num_stages)
        recompute = RecomputePolicy(mode=Mode(self.mode), **{"last_stage": "always", **self.policy})
        if self.plan is not None:
            return {"plan": self.plan, "schedule": self.schedule, "recompute": recompute}
        stages = {"num_stages": self.num_stages, "stages_per_rank": self.num_stages // self.num_ranks}
        return {**stages, "balance": list(balance), "schedule": self.schedule, "recompute": recompute}


# Two runs -------------------------------------------------------------------------------------------------------------


def plain(subject: Subject) -> Trace:
    """The plain loop. Raises what a layer raises."""
    seed_everything(SEED)
    layers, loss_fn = nn.Sequential(*subject.layers()), subject.loss()
    cuts: dict[str, Any] = {"num_microbatches": subject.num_microbatches, "count_fn": subject.count_fn}

    def step(number: int, inputs: Any, targets: Any) -> Tensor:
        return reference_step(layers, loss_fn, inputs, targets, seed=SEED, step=number, **cuts)

    return _train(
        subject, layers, range(len(layers)), step, lambda limit: nn.utils.clip_grad_norm_(layers.parameters(), limit)
    )


def piped(subject: Subject, way: Way) -> Trace:
    """As a pipeline; on several ranks what this rank holds. Raises what a layer raises, and what `Pipeline` does."""
    seed_everything(SEED)
    layers, loss_fn = nn.Sequential(*subject.layers()), subject.loss()
    replicas = way.plan.num_replicas if way.plan is not None else 1
    with Pipeline(
        list(layers),
        loss_fn,
        num_microbatches=subject.num_microbatches // replicas,
        seed=SEED,
        count_fn=subject.count_fn,
        **way.options(len(layers)),
    ) as pipeline:
        rank = pipeline.rank % pipeline.plan.num_ranks  # of a replica
        held = [number for stage in pipeline.plan.stages_of(rank) for number in pipeline.plan.layers_of(stage)]

        def step(_: int, inputs: Any, targets: Any) -> Tensor:
            return pipeline.step(*(pipeline.own_rows((inputs, targets)) if replicas > 1 else (inputs, targets)))

        trace = _train(subject, layers, held, step, pipeline.clip_grad_norm_)
        if replicas > 1:
            pipeline.check_replicas()
    return trace


def _train(
    subject: Subject,
    layers: nn.Sequential,
    held: Sequence[int],
    step: Callable[[int, Any, Any], Tensor],
    clip: Callable[[float], object],
) -> Trace:
    """All steps, with the values of the layers `held` after each."""
    trace: Trace = {}
    own = nn.ModuleDict({str(number): layers[number] for number in held})
    parameters = list(own.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if parameters else None
    for number in range(subject.num_steps):
        subject.before_step(number, list(layers))
        seed_everything(number)
        inputs, targets = subject.batch(number)
        trace[f"the loss of step {number + 1}"] = step(number, inputs, targets)
        for name, parameter in own.named_parameters():
            trace[f"the gradient of {name} in step {number + 1}"] = (
                None if (grad := parameter.grad) is None else grad.detach().clone()
            )
        if subject.max_norm is not None:
            clip(subject.max_norm)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in (*own.named_parameters(), *own.named_buffers()):
            trace[f"{name} after step {number + 1}"] = tensor.detach().clone()
    if subject.look is not None:
        trace["what is looked at in the end"] = subject.look(list(layers))
    return trace


def seed_everything(seed: int) -> None:
    """All generators that a user's functions may draw from; numpy's where somebody has loaded it."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# Beside each other ----------------------------------------------------------------------------------------------------


def beside(subject: Subject, expected: Trace, way: Way) -> Found:
    """Run `subject` in this `way` and compare with what the plain loop gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = piped(subject, way)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what ends a layer's forward on purpose must not come out either
            text = " ".join(str(error).split())
            if is_named(error):
                return Found(Verdict.REFUSED, text)
            return Found(Verdict.FAILED, f"{type(error).__name__}: {text}")
    said = list(dict.fromkeys(str(warning.message) for warning in caught))
    kept = tuple(text for text in said if _NOT_RECOMPUTED.search(text))
    if different := list(differences(ours, expected)):
        what, size = different[0]
        largest = max(size for _, size in different)
        return Found(Verdict.DIFFERS, f"{what} differs by {size:.3g} (largest of all: {largest:.3g})", kept)
    return Found(Verdict.KEPT if kept else Verdict.EQUAL, "; ".join(kept), kept)


def is_named(error: BaseException) -> bool:
    """Whether an error is one for the user: of no raw kind, and with the layer, leaf or argument in its text."""
    raw = isinstance(error, _RAW) or not isinstance(error, Exception)
    return not raw and _NAMES_SOMETHING.search(str(error)) is not None


def differences(
    ours: Trace, theirs: Trace, within: Callable[[str], float] = lambda _: 0.0
) -> Iterator[tuple[str, float]]:
    """What `ours` has that is not bit for bit the same in `theirs`, with the largest difference; NaN equals NaN. `within(name)` is by how
    much it may differ: the norm of the difference over the norm in `theirs`."""
    for what, value in ours.items():
        expected = theirs.get(what)
        if isinstance(value, Tensor) and isinstance(expected, Tensor):
            comparable = value.shape == expected.shape and value.numel() > 0
            least = within(what)
            is_close = comparable and least > 0 and bool((value - expected).norm() <= least * expected.norm())
            if not is_close and not same_tensor(value, expected):
                yield what, float((_dense(value) - _dense(expected)).abs().max()) if comparable else float("inf")
        elif isinstance(value, Tensor) or isinstance(expected, Tensor) or value != expected:
            yield what, float("inf")


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Same form, same values."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    one, other = _dense(one), _dense(other)
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
