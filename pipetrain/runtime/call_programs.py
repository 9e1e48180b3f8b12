"""Makes the program of a call: a checked schedule, laid out for one rank. Also chooses which microbatches are verified."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter

from pipetrain.plan.balance import balance_by_step, balance_told, costs_by_work, cut_by_work
from pipetrain.plan.plan import Plan
from pipetrain.runtime.program import Places, Program
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import AUTO, Generator
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make, with_first_backward
from pipetrain.schedule.op import Kind, Lane
from pipetrain.schedule.policy import EVERY, OFF, RecomputePolicy
from pipetrain.schedule.reduce import with_reduces
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.stage.layer_state import PARAMETERS, modules_below, tensors_below
from pipetrain.stage.segments import AnyStage

GivenSchedule = str | os.PathLike[str] | Generator | Schedule
"""What a pipeline takes as its schedule: a family's name, a CSV file, a generator, or the schedule itself."""

_Key = tuple[str, int, int]  # kind of call, number of microbatches, first stage with a backward


class Programs:
    """Makes one program for each kind of call: training or not, the number of microbatches, the first stage with a backward.

    `runs_ahead`: the host launches ops ahead of the device, in an order that all ranks share. `tied` are the pairs of stages that share
    parameters; a schedule gets REDUCE_GRADs for each pair. `work` has the relative time of each layer. If the policy does not say which
    layers form a part, the parts of a stage get about equal work; with `work=None`, about equal numbers of layers.

    Raises ValueError: the given schedule does not fit this plan; ScheduleError: it could deadlock, or does not do what its policy says.
    """

    def __init__(
        self,
        given: GivenSchedule,
        policy: RecomputePolicy,
        plan: Plan,
        rank: int,
        *,
        runs_ahead: bool = False,
        tied: tuple[tuple[int, int], ...] = (),
        work: Sequence[float] | None = None,
    ) -> None:
        self._rank = rank
        self._runs_ahead = runs_ahead
        self._given = None
        cut = None if work is None else cut_by_work(work, plan.balance)
        if isinstance(given, Schedule):
            _check_fits(given, plan)
            in_parts = dataclasses.replace(given, policy=given.policy.of_layers(plan.balance, cut, work))
            self._given = with_reduces(in_parts, tied, plan.num_replicas)
        spec = _spec_of(given, policy, plan, work)
        costs = costs_by_work(plan.balance, work, Costs.spread(plan.num_stages)) if spec.family == AUTO else None
        self._spec = dataclasses.replace(spec, costs=costs, tied=tied)
        self._cache: dict[_Key, Program] = {}
        self.whole()

    def describe(self) -> str:
        """Return a text that is equal on two ranks if family, policy and the order of ops in every lane are equal."""
        schedule = self.whole().schedule
        lanes = [[list(map(str, schedule.lane(rank, lane))) for lane in Lane] for rank in range(schedule.num_ranks)]
        return f"{schedule.family} {schedule.policy} {hashlib.sha256(repr(lanes).encode()).hexdigest()[:12]}"

    def whole(self) -> Program:
        """The program of `step` if every stage needs gradients. If a `Schedule` was given, it has all backwards of that schedule."""
        return self.training(0 if self._given is None else self._given.first_backward)

    def training(self, first_backward: int) -> Program:
        """The program of `step` if stages below `first_backward` need no gradient."""
        key = ("step", self._spec.num_microbatches, first_backward)
        if key not in self._cache:
            if self._given is not None:
                schedule = with_first_backward(self._given, first_backward)
            else:
                schedule = make(dataclasses.replace(self._spec, first_backward=first_backward))
            self._cache[key] = self._program(schedule)
        return self._cache[key]

    def inference(self, num_microbatches: int) -> Program:
        """The program of `evaluate`, `generate` and a call of the pipeline: only forwards, of `num_microbatches`."""
        key = ("inference", num_microbatches, self._spec.num_stages)
        if key not in self._cache:
            forwards = dataclasses.replace(self._spec, family="inference", warmup=None)
            self._cache[key] = self._program(make(dataclasses.replace(forwards, num_microbatches=num_microbatches)))
        return self._cache[key]

    def _program(self, schedule: Schedule) -> Program:
        check(schedule)
        if self._runs_ahead and not schedule.launch_order:
            schedule = for_device(schedule)
            check(schedule)
        return Program.of(schedule, self._rank)


def with_shortest_step(
    plan: Plan, given: GivenSchedule, policy: RecomputePolicy, work: Sequence[float] | None
) -> tuple[Plan, str]:
    """Return the plan with the balance (layers per stage) of the shortest simulated step, and a line for the log; empty: no new balance.

    In this simulation B takes twice the time of F, R the same time as F, a transfer no time. `work` has the relative time of each layer;
    None: all layers take the same time.
    """
    fixed = given if isinstance(given, Schedule) else None
    if fixed is not None:
        _check_fits(fixed, plan)
    spec, mean = _spec_of(given, policy, plan, work), Costs.spread(plan.num_stages)
    balance = balance_by_step(plan.balance, spec, lambda balance: costs_by_work(balance, work, mean), fixed)
    told = balance_told(balance, plan.balance, spec.policy if fixed is None else fixed.policy)
    return dataclasses.replace(plan, balance=balance), told


def _spec_of(given: GivenSchedule, policy: RecomputePolicy, plan: Plan, work: Sequence[float] | None) -> ScheduleSpec:
    """The spec from which schedules of the plan are made, without its `tied` and `costs`."""
    cut = None if work is None else cut_by_work(work, plan.balance)
    return ScheduleSpec(
        family="gpipe" if isinstance(given, Schedule) else given,
        stage_ranks=plan.stage_ranks,
        num_microbatches=plan.num_microbatches,
        policy=policy.for_replicas(plan.num_replicas).of_layers(plan.balance, cut, work),
        split_backward=not isinstance(given, Schedule) and plan.split_backward,
        warmup=None if isinstance(given, Schedule) else plan.warmup,
        transport_ahead=plan.transport_ahead,
        num_replicas=plan.num_replicas,
    )


def _check_fits(schedule: Schedule, plan: Plan) -> None:
    if (m := schedule.num_microbatches) != plan.num_microbatches:
        raise ValueError(
            f"the schedule is for {m} microbatches, the pipeline has num_microbatches={plan.num_microbatches}"
        )
    if (ranks := list(schedule.stage_ranks)) != list(plan.stage_ranks):
        raise ValueError(
            f"the schedule has its stages on ranks {ranks}, the pipeline on {list(plan.stage_ranks)}; give a plan with its placement too, "
            f"as in plan=make_plan(..., placement={ranks})"
        )


# Which microbatches are verified --------------------------------------------------------------------------------------

_NOTHING: Places = frozenset()
_LAYERS, _IS_TRAINING, _REQUIRES_GRAD = attrgetter("layers"), attrgetter("training"), attrgetter("requires_grad")


class Proving:
    """Chooses which microbatches of one rank are verified in a step; `verify` is the value of the key `recompute.verify`."""

    def __init__(self, stages: Mapping[int, AnyStage], verify: str | int) -> None:
        self._stages = stages
        self._verify = verify
        self._proved: set[Hashable] = set()
        self._recomputed: tuple[Program | None, list[tuple[int, list[int | None]]]] = (None, [])  # by stage

    def choose(
        self, signature: int, step: int, program: Program, idle: frozenset[int] = frozenset()
    ) -> tuple[Places, Places]:
        """Return the (stage, microbatch) pairs to verify: their F inspects the layers, and their R, if they have one, is compared with F.
        Also return pairs whose F and R are compared by checksums: one of each stage with an R; the next step takes its next microbatch.
        `signature` is that of the step's `Call`; microbatches in `idle` do not run."""
        if self._verify == OFF:
            return _NOTHING, _NOTHING
        if self._recomputed[0] is not program:
            stages = sorted({stage for stage, _ in program.recomputed})
            numbers = {s: sorted((m for stage, m in program.recomputed if stage == s), key=str) for s in stages}
            self._recomputed = program, list(numbers.items())
        witnessed: set[tuple[int, int | None]] = set()
        for stage, microbatches in self._recomputed[1]:
            witnessed.add((stage, microbatches[step % len(microbatches)]))
        layers = itertools.chain.from_iterable(map(_LAYERS, self._stages.values()))
        modules = modules_below(layers)
        flags = map(_REQUIRES_GRAD, tensors_below(modules, PARAMETERS))
        kind = signature, tuple(map(_IS_TRAINING, modules)), tuple(flags)
        proved = program.recomputed if self._verify == EVERY else _NOTHING
        if kind not in self._proved:
            if first := _in_turn(program, 0, idle):  # empty if all microbatches of this replica are idle
                self._proved.add(kind)
            proved |= first
        elif isinstance(self._verify, int) and step % self._verify == 0:
            proved = _in_turn(program, step // self._verify, idle) & program.recomputed
        return proved, frozenset(witnessed - proved)


def _in_turn(program: Program, turn: int, idle: frozenset[int]) -> Places:
    """Return a (stage, microbatch) pair per stage; the next `turn` takes the next one. If a stage has R, only microbatches with R count."""
    found: dict[int, list[int | None]] = {}
    for kind in (Kind.F, Kind.R):
        order: dict[int, list[int | None]] = {}
        for op in program.ops:
            if op.kind is kind and op.microbatch not in idle and op.microbatch not in order.get(op.stage, ()):
                order.setdefault(op.stage, []).append(op.microbatch)  # each once, though its R may be several ops
        found |= order
    return frozenset((stage, microbatches[turn % len(microbatches)]) for stage, microbatches in found.items())
