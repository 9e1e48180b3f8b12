"""What all ranks agree on before the ops of a call run: its kind, its shapes, and the schedule that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.group.chain import Chain
from pipetrain.plan.plan import Plan
from pipetrain.runtime.cut import cut, num_rows
from pipetrain.runtime.executor import Program
from pipetrain.schedule.check import check
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.stage import Stage
from pipetrain.transport.forms import Form

# So that a header stays within its fixed size.
_LONGEST_ERROR = 600


@dataclass(frozen=True)
class Introduction:
    """What each rank tells the others when a pipeline is made."""

    plan: str
    schedule: str
    seed: int
    problem: str | None


def introduce(own: Introduction, chain: Chain) -> None:
    """Compare with rank 0, whose introduction goes down the chain; what the last rank then knows comes back.

    Raises:
        ValueError: the first rank's problem, if there is one; or a rank that was given something else than rank 0.
    """
    what = "the other ranks' plans"

    def compare(header: dict[str, Any]) -> None:
        header["error"] = header["error"] or _mistake(chain.rank, own, Introduction(**header["first"]))

    header = chain.relay({"first": asdict(own), "error": ""}, compare, what)
    error = chain.text_from_last(header["error"], what)
    if error:
        raise ValueError(error)


def _mistake(rank: int, own: Introduction, first: Introduction) -> str:
    if own.problem:
        return own.problem
    for key in ("plan", "schedule", "seed"):
        mine, theirs = getattr(own, key), getattr(first, key)
        if mine != theirs:
            return f"rank {rank} was given another {key} than rank 0: {mine}, not {theirs}"
    return ""


@dataclass(frozen=True)
class Call:
    """One call of the pipeline, as this rank knows it.

    `described_before` and `described_after` say whether messages over the edges to the rank before and after carry their
    form. `first_backward` is the first stage, up to this rank's, in which something needs a gradient.
    """

    num_microbatches: int
    rows: int
    signature: int
    first_backward: int
    described_before: bool
    described_after: bool
    error: str | None

    @staticmethod
    def of(received: Mapping[str, Any], amended: Mapping[str, Any]) -> Call:
        return Call(
            num_microbatches=amended["num_microbatches"],
            rows=amended["rows"],
            signature=amended["signature"],
            first_backward=amended["first_backward"],
            described_before=received["described"],
            described_after=amended["described"],
            error=amended["error"],
        )


class Signatures:
    """Numbers the kinds of calls whose messages have the same forms, and remembers the forms."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._forms: dict[int, dict[Op, Form]] = {}
        self._trainable: dict[
            int, tuple[bool, ...]
        ] = {}  # signature -> which of this rank's parameters need a gradient

    def ask(self, kind: str, inputs: Any, most_microbatches: int, training: bool) -> dict[str, Any]:
        """What the first rank asks for; a mistake in the inputs travels in it, so that every rank raises it."""
        asked: dict[str, Any] = {
            "error": None,
            "rows": 0,
            "num_microbatches": 0,
            "signature": 0,
            "described": False,
        }
        try:
            rows = num_rows(inputs, "inputs")
            if not rows:
                raise ValueError(f"{kind} was given no rows on rank 0, which holds the first stage")
            wanted = most_microbatches if kind == "step" else min(most_microbatches, rows)
            if rows < wanted:
                cut(inputs, wanted)
        except (ValueError, TypeError) as error:
            return {**asked, "error": str(error)[:_LONGEST_ERROR]}
        number, described = self._number_of(kind, wanted, training, inputs)
        return {**asked, "rows": rows, "num_microbatches": wanted, "signature": number, "described": described}

    def _number_of(self, kind: str, num_microbatches: int, training: bool, inputs: Any) -> tuple[int, bool]:
        """The number of a call with these inputs, and whether it is the first of its kind."""
        leaves, spec = pytree.tree_flatten(inputs)
        shapes = tuple(
            (leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves
        )
        autocast = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        )
        key = (kind, num_microbatches, training, autocast, shapes, str(spec))
        known = len(self._numbers)
        number = self._numbers.setdefault(key, known)
        return number, number == known

    def amend(self, header: dict[str, Any], stages: Mapping[int, Stage], plan: Plan) -> None:
        """Add what this rank knows: whether it needs gradients, and whether that changed since the last such call."""
        if header["error"]:
            return  # no messages follow, so nothing was described
        flags = tuple(
            parameter.requires_grad
            for stage in stages.values()
            for layer in stage.layers
            for parameter in layer.parameters()
        )
        number = header["signature"]
        header["described"] = header["described"] or self._trainable.get(number) != flags
        self._trainable[number] = flags
        header["first_backward"] = min(header["first_backward"], first_trainable(stages, plan))

    def forms(self, number: int) -> dict[Op, Form]:
        return self._forms.setdefault(number, {})


def first_trainable(stages: Mapping[int, Stage], plan: Plan) -> int:
    """The first of these stages in which a parameter needs a gradient; `num_stages` where there is none."""
    return min(
        (
            index
            for index, stage in stages.items()
            if any(parameter.requires_grad for layer in stage.layers for parameter in layer.parameters())
        ),
        default=plan.num_stages,
    )


class Programs:
    """The schedules of a pipeline, checked before they run and laid out for one rank."""

    def __init__(self, schedule: str | Schedule, policy: RecomputePolicy, plan: Plan, rank: int) -> None:
        self._wanted = schedule
        self._policy = policy
        self._plan = plan
        self._rank = rank
        self._cache: dict[tuple[str, int, int], Program] = {}
        self.whole()

    def describe(self) -> str:
        """For comparing ranks."""
        wanted = self._wanted if isinstance(self._wanted, str) else repr(self._wanted.lanes)
        return f"{wanted} {self._policy}"

    def whole(self) -> Program:
        """The program of `step` with every stage's gradients, or with those that a given schedule has."""
        return self.training(self._wanted.first_backward if isinstance(self._wanted, Schedule) else 0)

    def training(self, first_backward: int) -> Program:
        """The program of `step` where stages below `first_backward` need no gradient."""
        if isinstance(self._wanted, Schedule):
            self._check_given(self._wanted, first_backward)
            return self._program("given", self._wanted.num_microbatches, first_backward, self._wanted)
        return self._program(self._wanted, self._plan.num_microbatches, first_backward, None)

    def inference(self, num_microbatches: int) -> Program:
        return self._program("inference", num_microbatches, self._plan.num_stages, None)

    def _program(self, family: str, num_microbatches: int, first_backward: int, given: Schedule | None) -> Program:
        key = (family, num_microbatches, first_backward)
        if key not in self._cache:
            schedule = given or make_schedule(
                family,
                num_stages=self._plan.num_stages,
                num_microbatches=num_microbatches,
                num_ranks=self._plan.num_ranks,
                recompute=self._policy,
                first_backward=first_backward,
            )
            check(schedule)
            self._cache[key] = Program.of(schedule, self._rank)
        return self._cache[key]

    def _check_given(self, schedule: Schedule, first_backward: int) -> None:
        if schedule.stage_ranks != self._plan.stage_ranks or schedule.num_microbatches != self._plan.num_microbatches:
            raise ValueError(
                f"the schedule is for {schedule.num_microbatches} microbatches and stages on ranks {schedule.stage_ranks}; the "
                f"pipeline has num_microbatches={self._plan.num_microbatches} and stages on ranks {self._plan.stage_ranks}"
            )
        if first_backward not in (schedule.first_backward, self._plan.num_stages):
            raise ValueError(
                f"the schedule runs B from stage {schedule.first_backward} on, but the first stage in which something needs a "
                f"gradient is {first_backward}: give a schedule made with first_backward={first_backward}"
            )
