"""What all ranks agree on when a pipeline is made: that they were given the same, and the schedules that follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pipetrain.group.chain import Chain
from pipetrain.plan.plan import Plan
from pipetrain.runtime.executor import refuse_unknown_kinds
from pipetrain.runtime.program import Program
from pipetrain.schedule.check import check
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule


@dataclass
class Introduction:
    """What each rank tells the others when a pipeline is made; with a `problem` the rest says nothing."""

    seed: int
    model: str = ""  # its fingerprint
    plan: str = ""
    schedule: str = ""
    problem: str = ""


@contextmanager
def introduced(chain: Chain, seed: int) -> Iterator[Introduction]:
    """In the block a rank makes its own part and fills in its introduction; then it compares with the other ranks. Collective.

    Raises:
        ValueError: what was wrong (ValueError, TypeError) on a rank, the first one of them; or a rank that was given something
            else than rank 0. The same on every rank.
    """
    own, problem = Introduction(seed), None
    try:
        yield own
    except (ValueError, TypeError) as error:
        own.problem, problem = str(error), error
    try:
        introduce(own, chain)
    except ValueError as agreed:
        raise agreed from problem


def introduce(own: Introduction, chain: Chain) -> None:
    """Compare with rank 0, whose introduction goes down the chain; what the last rank then knows comes back. Collective.

    Raises:
        ValueError: the first rank's problem, if there is one; or a rank that was given something else than rank 0. The same
            on every rank.
    """
    what = "the other ranks' plans"

    def compare(received: bytes | None) -> bytes:
        header: dict[str, Any] = {"first": asdict(own), "error": ""} if received is None else json.loads(received)
        header["error"] = header["error"] or _mistake(chain.rank, own, Introduction(**header["first"]))
        return json.dumps(header).encode()

    known = json.loads(chain.down(compare, what))
    if error := chain.broadcast(known["error"].encode(), chain.num_ranks - 1, what).decode():
        raise ValueError(error)


def _mistake(rank: int, own: Introduction, first: Introduction) -> str:
    if own.problem:
        return own.problem
    for key in ("model", "plan", "schedule", "seed"):
        mine, theirs = getattr(own, key), getattr(first, key)
        if mine != theirs:
            return f"rank {rank} was given another {key} than rank 0: {mine}, not {theirs}"
    return ""


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
            refuse_unknown_kinds(schedule)
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
