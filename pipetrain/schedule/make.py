"""Makes a schedule of a ScheduleSpec: a generator orders F and B, then passes add R, messages, waits and reduces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence

from pipetrain.schedule.check import check, stash_within_bounds, violation_of
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import read_csv
from pipetrain.schedule.families import ALWAYS_SPLIT, AUTO, ComputeLanes, Generator, Shape, generator_of
from pipetrain.schedule.halves import closed_up, is_split, orders_of_w
from pipetrain.schedule.kinds import COPY_LANES, GIVES_GRADIENTS, OFFLOAD, RECOMPUTE, RELOAD
from pipetrain.schedule.messages import add_messages
from pipetrain.schedule.offload import Placing, rules_of_copies
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.placement import Placement, stage_ranks_of
from pipetrain.schedule.policy import Offload, RecomputePolicy
from pipetrain.schedule.recompute import (
    AllKept,
    Sets,
    add_recompute,
    decides_itself,
    has_gaps_for_r,
    hold_back,
    into_gaps,
    keep_all,
    kept_patterns,
    of_lanes,
)
from pipetrain.schedule.reduce import add_reduces
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import MOST_COMPARED, ScheduleSpec
from pipetrain.schedule.search.by_stage import MOST_PLACED, by_rule
from pipetrain.schedule.search.list_order import ListedOrder, OrderProblem, list_order
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.waits import add_waits

_OF_BACKWARD = GIVES_GRADIENTS | {RECOMPUTE, OFFLOAD, RELOAD}

_MOST_TRIED = 2**13  # stages x microbatches x rules of `offload.py`: a second or two

OrdersOfW = Callable[[Schedule, Costs], Iterator[Schedule]]


def make_schedule(
    family: str | os.PathLike[str] | Generator = "gpipe",
    *,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None = None,
    placement: Placement = "loop",
    recompute: str | RecomputePolicy = "overlap",
    warmup: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    first_backward: int = 0,
    transport_ahead: int = 2,
    split_backward: bool = False,
    tied: Sequence[tuple[int, int]] = (),
    num_replicas: int = 1,
) -> Schedule:
    """The schedule of a family, of a file that ends in .csv, or of a generator: all lanes, and what each op waits for.

    `placement` says which of `num_ranks` ranks (default: a rank per stage, or those that a list names) holds which stage:
    `loop`, `v`, or a list with the rank of each stage. The rest is as in `ScheduleSpec`.

    Raises:
        ValueError: an unknown family, a file that does not fit, or numbers that do not fit each other.
    """
    return make(
        ScheduleSpec(
            family=family,
            stage_ranks=stage_ranks_of(placement, num_stages, num_ranks),
            num_microbatches=num_microbatches,
            policy=RecomputePolicy.of(recompute).for_replicas(num_replicas),
            warmup=warmup,
            costs=costs,
            first_backward=first_backward,
            transport_ahead=transport_ahead,
            split_backward=split_backward,
            tied=tuple(tied),
            num_replicas=num_replicas,
        )
    )


def make(spec: ScheduleSpec) -> Schedule:
    """The schedule that `spec` asks for.

    Raises:
        ValueError: as `make_schedule`.
    """
    costs = spec.costs or Costs.spread(spec.num_stages)
    has_sets = spec.policy.offloads and spec.first_backward < spec.num_stages
    if has_sets and spec.order is None and (spec.family == AUTO or not decides_itself(draft_of(spec, _ordered(spec)))):
        return with_copies(spec, costs)
    return _without_copies(spec, costs)


def _without_copies(spec: ScheduleSpec, costs: Costs) -> Schedule:
    """The schedule of `spec`. It adds no copies; those of an order or a file stay."""
    if spec.family == AUTO:  # an order with R in it: one that a search found before, or else that of list scheduling
        if spec.order is not None:
            return held_to(spec, spec.order)
        order = lanes_of_ranks(spec, list_order(problem_of(spec, costs)))
        if spec.num_stages * spec.num_microbatches > MOST_COMPARED:
            return _as_ordered(spec, order)
        # If both are equally fast, take the first: its R starts when a slot is free, so it adapts to real times.
        return _fastest([_as_ordered(spec, order), held_to(spec, order)], costs)
    draft, orders = _split(spec, draft_of(spec, _ordered(spec)))
    for op, violation in stash_within_bounds(
        draft
    ):  # the error is one line; `check` would refuse this too, but only after all passes
        allowed = draft.policy.stash_of(op.stage)
        raise ValueError(f"pipeline.schedule={draft.family} recompute.stash={allowed}: {violation}")
    return _fastest([lower(draft, kept, costs, orders) for kept in dict.fromkeys(kept_patterns(draft))], costs)


def with_copies(spec: ScheduleSpec, costs: Costs, most_placed: int = MOST_PLACED) -> Schedule:
    """The fastest of: schedules with the copies of `offload.py`; in the family `auto` without segments, those of `by_stage.py`;
    unless offload=always, the one without copies. A smaller `most_placed` means a faster search, but maybe a longer step.

    Raises:
        ValueError: as `make_schedule`.
    """
    plain = _without_copies(
        dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, offload=Offload.NONE)), costs
    )
    # The B of part 0 is the last of a backward. The whole B takes its place.
    lanes = (plain.lane(rank, Lane.COMPUTE) for rank in range(plain.num_ranks))
    own = [[op._replace(part=None) for op in lane if op.kind is not RECOMPUTE and not op.part] for lane in lanes]
    beside = costs.beside_copies()
    placings = [Placing(draft_of(spec, own), beside)]
    if is_split(plain):  # a W right behind its I frees the set as early as possible
        placings.append(Placing(closed_up(draft_of(spec, own)), beside))
    most = max(1, _MOST_TRIED // (spec.num_stages * spec.num_microbatches))
    rules = list(itertools.islice(rules_of_copies(), most))
    placed = min((placing.place(rule) for placing in placings for rule in rules), key=lambda one: one.seconds)
    if placed.seconds == math.inf and spec.policy.offload is Offload.ALWAYS:
        raise ValueError(
            f"recompute.offload=always: pipeline.schedule={spec.name} cannot copy "
            "all sets with so few slots and so few sets on the host; use recompute.offload=auto"
        )
    found = [held_to(spec, placed.lanes)] if placed.seconds < math.inf else []
    if spec.policy.offload is not Offload.ALWAYS:
        found.insert(0, dataclasses.replace(plain, policy=spec.policy))
    if spec.family == AUTO and not spec.policy.in_parts:
        seconds = simulate(_fastest(found, costs), costs).step_seconds
        for order in by_rule(problem_of(spec, beside), seconds, most_placed):
            found += sound(spec, order)
    return _fastest(found, costs)


def held_to(spec: ScheduleSpec, order: ComputeLanes) -> Schedule:
    """The schedule in which each R starts no earlier than where `order` has it.

    Raises:
        ValueError: `order` has an op that its rank may not run.
    """
    return hold_back(_as_ordered(spec, _checked(order, spec.name, spec.shape)), order)


def sound(spec: ScheduleSpec, order: ComputeLanes | ListedOrder) -> list[Schedule]:
    """The schedule of an order from the cache or a search; none if it cannot run.

    A file of the cache may be damaged. A search may round ops to length 0 and then swap them.
    """
    with contextlib.suppress(ValueError):
        schedule = held_to(spec, lanes_of_ranks(spec, order) if isinstance(order, ListedOrder) else order)
        check(schedule)
        return [schedule]
    return []


def _as_ordered(spec: ScheduleSpec, order: ComputeLanes) -> Schedule:
    return with_waits(add_recompute(draft_of(spec, order)))


def problem_of(spec: ScheduleSpec, costs: Costs) -> OrderProblem:
    """The problem that the search for the family `auto` solves."""
    return OrderProblem(costs, spec.num_microbatches, spec.policy, spec.first_backward, spec.split_backward)


def lanes_of_ranks(spec: ScheduleSpec, found: ListedOrder) -> ComputeLanes:
    """The lane found for each stage, in the order of the ranks that hold them."""
    return of_lanes([found.lanes[stage] for rank in range(spec.num_stages) for stage in spec.shape.stages_of(rank)])


def _split(spec: ScheduleSpec, ordered: Schedule) -> tuple[Schedule, OrdersOfW | None]:
    """The order with each W right behind its I, and the function that finds positions for W. If nothing is split: the order, and None."""
    if spec.family in ALWAYS_SPLIT:
        return closed_up(ordered), functools.partial(orders_of_w, given=ordered)
    if not spec.split_backward:
        return ordered, None
    if is_split(ordered):
        raise ValueError(
            f"pipeline.split_backward=true: pipeline.schedule={spec.name} says itself where I and W are; leave out "
            "pipeline.split_backward"
        )
    return closed_up(ordered), orders_of_w


def _ordered(spec: ScheduleSpec) -> ComputeLanes:
    shape = spec.shape
    if callable(spec.family):
        try:
            lanes = spec.family(shape)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"generator {spec.name}: {type(error).__name__}: {error}") from error
        return _checked(lanes, spec.name, shape)
    family = str(spec.family)
    return read_csv(family, shape) if family.endswith(".csv") else generator_of(family)(shape)


def _checked(lanes: ComputeLanes, name: str, shape: Shape) -> ComputeLanes:
    """The lanes of a generator or an order. Refuses ops of a missing stage or microbatch: passes do not check this."""
    if not isinstance(lanes, list | tuple) or not all(isinstance(lane, list | tuple) for lane in lanes):
        raise ValueError(
            f"generator {name}: gave a {type(lanes).__name__}; allowed is a list with a list of ops for each rank"
        )
    if len(lanes) != shape.num_ranks:
        raise ValueError(
            f"generator {name}: gave {len(lanes)} lanes; allowed is one per rank, which makes {shape.num_ranks}"
        )
    for rank, lane in enumerate(lanes):
        for op in lane:
            fault = violation_of(op, rank, shape) if isinstance(op, Op) else "is no Op"
            if fault:
                raise ValueError(f"generator {name}, rank {rank}: {op} {fault}")
    return lanes


def draft_of(spec: ScheduleSpec, compute: ComputeLanes) -> Schedule:
    """A schedule with only its compute lanes. Stages before `first_backward` have no R, copies and backwards."""
    draft = Schedule(
        family=spec.name,
        num_microbatches=spec.num_microbatches,
        stage_ranks=spec.stage_ranks,
        policy=spec.policy,
        lanes=tuple({Lane.COMPUTE: _needed(ops, spec.first_backward)} for ops in compute),
        waits={},
        kept=frozenset(),
        first_backward=spec.first_backward,
        transport_ahead=spec.transport_ahead,
        tied=spec.tied,
        num_replicas=spec.num_replicas,
    )
    return keep_all(draft) if isinstance(compute, AllKept) else draft


def _needed(ops: Sequence[Op], first_backward: int) -> tuple[Op, ...]:
    return tuple(op for op in ops if op.stage >= first_backward or op.kind not in _OF_BACKWARD)


def lower(draft: Schedule, chosen: Sets, costs: Costs, orders: OrdersOfW | None = None) -> Schedule:
    """The passes, in order. `chosen` are the sets to keep besides those whose B comes right after their F.

    `orders`, if given, makes orders of W to choose from. The draft then has each W right behind its I.
    """
    recomputed = add_recompute(draft, chosen)
    made = orders(recomputed, costs) if orders else iter((recomputed,))
    is_large = draft.num_stages * draft.num_microbatches > MOST_COMPARED
    usual = _fastest([with_waits(order) for order in itertools.islice(made, 1 if is_large else None)], costs)
    if decides_itself(draft) or not has_gaps_for_r(usual):
        return usual
    return _fastest([with_waits(into_gaps(usual, costs)), usual], costs)


def _fastest(schedules: Sequence[Schedule], costs: Costs) -> Schedule:
    """The fastest schedule; of equally fast ones the first."""
    if len(schedules) == 1:
        return schedules[0]
    return min(schedules, key=lambda schedule: simulate(schedule, costs).step_seconds)


def with_waits(ordered: Schedule) -> Schedule:
    """The last passes. They do not change the order of the compute and recompute lanes."""
    return add_reduces(add_waits(add_messages(ordered), ordered.transport_ahead))


def with_first_backward(schedule: Schedule, first_backward: int) -> Schedule:
    """`schedule` for a model in which nothing below stage `first_backward` needs a gradient.

    The ops that are left keep their order and their sets. Messages and waits are made again.

    Raises:
        ValueError: `schedule` has no B for a stage that needs one now.
    """
    if first_backward == schedule.first_backward:
        return schedule
    if first_backward < schedule.first_backward:
        raise ValueError(
            f"the schedule runs B from stage {schedule.first_backward} on, but the first stage in which something needs a "
            f"gradient is {first_backward}: give a schedule made with first_backward={first_backward}"
        )
    queues = (Lane.COMPUTE, Lane.RECOMPUTE, *COPY_LANES)
    ordered = dataclasses.replace(
        schedule,
        lanes=tuple(
            {lane: _needed(ops, first_backward) for lane, ops in lanes.items() if lane in queues}
            for lanes in schedule.lanes
        ),
        kept=frozenset((stage, microbatch) for stage, microbatch in schedule.kept if stage >= first_backward),
        first_backward=first_backward,
        launch_order=(),
        order=tuple(_needed(ops, first_backward) for ops in schedule.order),
    )
    return with_waits(ordered)
