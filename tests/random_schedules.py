"""Schedules, costs and changed schedules for property tests (hypothesis). Knows no torch.

`cases` draws what `make_schedule` is asked for; `random_schedules` changes waits, queues and lanes of what it makes, so
that some are broken and some are sound in a way that no family makes; `mutants` breaks one thing at a time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import ALWAYS_SPLIT, FAMILIES, Generator, Shape, generator_of
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Keep, LastStage, Mode, PerStage, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

TIMES = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.0]), st.floats(0.0, 4.0))


@dataclass(frozen=True)
class Case:
    """Arguments of `make_schedule`, and costs for it."""

    arguments: dict[str, Any]
    costs: Costs

    def make(self) -> Schedule:
        return make_schedule(**self.arguments, costs=self.costs)

    @property
    def is_split(self) -> bool:
        """Whether every backward is an I and a W."""
        family = self.arguments["family"]
        return callable(family) or family in ALWAYS_SPLIT or self.arguments.get("split_backward", False)


def split(family: str, delay: int) -> Generator:
    """`family` with I in the place of each B, and W after the I of the microbatch that is `delay` later, or at the end."""

    def halved(shape: Shape) -> list[list[Op]]:
        lanes = []
        for compute in generator_of(family)(shape):
            lane: list[Op] = []
            late: defaultdict[int, list[Op]] = defaultdict(list)
            for op in compute:
                lane.append(op._replace(kind=Kind.I) if op.kind is Kind.B else op)
                if op.kind is Kind.B:
                    late[op.stage].append(op._replace(kind=Kind.W))
                    if len(late[op.stage]) > delay:
                        lane.append(late[op.stage].pop(0))
            lanes.append([*lane, *(op for ops in late.values() for op in ops)])
        return lanes

    return halved


@st.composite
def cases(
    draw: st.DrawFn,
    max_ranks: int = 6,
    max_microbatches: int = 20,
    with_split: bool = True,
    with_parts: bool = True,
    with_ties: bool = True,
    with_replicas: bool = True,
) -> Case:
    """What any family can be asked for; also with backward split into I and W, with stages recomputed in parts, with stages that
    share parameters, and for several replicas."""
    families = [name for name in FAMILIES if with_split or name not in ALWAYS_SPLIT]
    family = draw(st.sampled_from(families))
    ranks = draw(st.integers(1, max_ranks))
    per_rank = {"1f1b": st.just(1), "zb-h1": st.just(1), "zbv": st.just(2)}
    stages = ranks * draw(per_rank.get(family, st.integers(1, 3)))
    placement = draw(placements(family, stages, ranks))
    microbatches = draw(st.integers(1, max_microbatches))
    segments = draw(st.sampled_from([1, 1, 2, 3])) if with_parts and family not in ALWAYS_SPLIT else 1
    place = st.integers(1, 4) if segments == 1 else st.integers(1, 3 * segments).map(lambda count: count / segments)
    places = st.one_of(place, st.lists(place, min_size=stages, max_size=stages))
    policy = RecomputePolicy(
        mode=draw(st.sampled_from(Mode)),
        sets=draw(places),
        segments=segments,
        keep=draw(st.sampled_from([None, *Keep])),
        last_stage=draw(st.sampled_from(LastStage)),
    )
    arguments = {
        "family": family,
        "num_stages": stages,
        "num_ranks": ranks,
        "placement": placement,
        "num_microbatches": microbatches,
        "recompute": policy,
        "first_backward": draw(st.one_of(st.just(0), st.integers(0, stages))),
        "transport_ahead": draw(st.integers(0, 3)),
    }
    if with_ties and stages > 1 and draw(st.booleans()):
        pairs = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).filter(lambda pair: pair[0] < pair[1])
        arguments["tied"] = sorted(draw(st.sets(pairs, min_size=1, max_size=3)), reverse=True)
    if with_replicas and draw(st.booleans()):
        arguments["num_replicas"] = draw(st.integers(2, 4))
    if family == "1f1b":
        arguments["warmup"] = draw(
            st.one_of(st.none(), st.integers(1, max(ranks, (microbatches - 1) * (ranks - 1) + 1)))
        )
    if with_split and segments == 1 and family not in ("inference", *ALWAYS_SPLIT) and draw(st.booleans()):
        places = 4 if policy.mode is Mode.NEVER else min(numbers(policy.sets))
        if draw(st.booleans()):
            arguments["split_backward"] = True
        else:
            arguments["family"] = split(family, draw(st.integers(0, places - 1)))
    return Case(arguments, draw(costs_of(stages)))


def numbers(value: PerStage) -> tuple[int, ...]:
    """Those of all stages, or the one for all."""
    return value if isinstance(value, tuple) else (value,)


def placements(family: str, stages: int, ranks: int) -> st.SearchStrategy[str | list[int]]:
    """Those that the family takes: names, and each rank once with the other stages anywhere."""
    if family in ("interleaved", "zbv"):
        return st.just("v" if family == "zbv" else "loop")
    anywhere = st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks)
    lists = anywhere.flatmap(lambda others: st.permutations([*range(ranks), *others]))
    return st.one_of(st.just("loop"), st.just("v"), lists)


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> Costs:
    def times(count: int) -> tuple[float, ...]:
        if draw(st.booleans()):
            return (draw(TIMES),) * count
        return tuple(draw(st.lists(TIMES, min_size=count, max_size=count)))

    halves = (times(stages), times(stages)) if draw(st.booleans()) else ((), ())
    return Costs(
        times(stages),
        times(stages),
        times(stages),
        times(stages - 1),
        times(stages - 1),
        input_gradient=halves[0],
        weight_gradient=halves[1],
        reduce=times(stages) if draw(st.booleans()) else (),
        reduce_shared=times(stages) if draw(st.booleans()) else (),
    )


@st.composite
def mutants(draw: st.DrawFn) -> tuple[Schedule, Op | None]:
    """A valid schedule that was broken, or not: an op dropped, doubled, moved within its lane or to another rank, two
    swapped, a wait left out, or a policy that allows less than the schedule takes. With the op that is waited for no
    more, if it is that."""
    schedule = draw(cases(max_ranks=4, max_microbatches=6)).make()
    change = draw(st.sampled_from(["drop", "double", "move", "swap", "emigrate", "unwait", "tighten"]))
    if change == "unwait":
        return draw(without_a_wait(schedule))
    if change == "tighten":
        policy = schedule.policy
        parts = policy.segments
        counts = (round(count * parts) for count in numbers(policy.sets))
        fewer = tuple(_of_sets(draw(st.integers(1, count)), parts) for count in counts)
        sets = fewer if isinstance(policy.sets, tuple) else fewer[0]
        return dataclasses.replace(schedule, policy=dataclasses.replace(policy, sets=sets)), None
    places = [(rank, lane) for rank in range(schedule.num_ranks) for lane in Lane if schedule.lane(rank, lane)]
    rank, lane = draw(st.sampled_from(places))
    ops = list(schedule.lane(rank, lane))
    first, second = draw(st.integers(0, len(ops) - 1)), draw(st.integers(0, len(ops) - 1))
    if change == "swap":
        ops[first], ops[second] = ops[second], ops[first]
    elif change == "double":
        ops.insert(second, ops[first])
    else:
        op = ops.pop(first)
        if change == "move":
            ops.insert(second, op)
        elif change == "emigrate":
            other_rank, other_lane = draw(st.sampled_from(places))
            if (other_rank, other_lane) != (rank, lane):
                others = schedule.lane(other_rank, other_lane)
                place = draw(st.integers(0, len(others)))
                schedule = with_lane(schedule, other_rank, other_lane, (*others[:place], op, *others[place:]))
    return with_lane(schedule, rank, lane, tuple(ops)), None


def _of_sets(places: int, parts: int) -> float:
    return places if parts == 1 else places / parts


@st.composite
def without_a_wait(draw: st.DrawFn, schedule: Schedule) -> tuple[Schedule, Op | None]:
    edges = [(op, other) for op, awaited in schedule.waits.items() if op.kind.computes for other in awaited]
    if not edges:
        return schedule, None
    op, gone = draw(st.sampled_from(edges))
    rest = tuple(other for other in schedule.waits[op] if other != gone)
    return dataclasses.replace(schedule, waits={**schedule.waits, op: rest}), gone


def with_lane(schedule: Schedule, rank: int, lane: Lane, ops: tuple[Op, ...]) -> Schedule:
    lanes = list(schedule.lanes)
    lanes[rank] = {**lanes[rank], lane: ops}
    return dataclasses.replace(schedule, lanes=tuple(lanes))


@st.composite
def random_schedules(
    draw: st.DrawFn,
    max_ranks: int = 4,
    max_microbatches: int = 5,
    max_changes: int = 4,
    with_split: bool = True,
    with_replicas: bool = True,
) -> tuple[Schedule, Costs]:
    """A schedule of any family, shape and mode with up to `max_changes` changes, and costs for it. About half are sound.

    Most changes add a wait that the simulated step obeys in any case, so that they add up to schedules which are sound
    and which no family makes: F waits for a SEND, a RECV for an R, sends and receives of one queue for different ops.
    `with_split=False` leaves out schedules with I and W (but for an op that becomes one, which `check` refuses).
    """
    sizes = {"max_ranks": max_ranks, "max_microbatches": max_microbatches}
    case = draw(cases(**sizes, with_split=with_split, with_replicas=with_replicas))
    schedule = case.make()
    for _ in range(draw(st.integers(0, max_changes))):
        change = draw(st.sampled_from([delayed, delayed, delayed, delayed, *CHANGES]))
        schedule = draw(change(schedule))
    return schedule, case.costs


@st.composite
def delayed(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """An op waits for one that its rank ends before in a simulated step; a schedule that is not sound stays as it is."""
    try:
        check(schedule)
    except ScheduleError:
        return schedule
    timeline = simulate(schedule, Costs.spread(schedule.num_stages, hop=0.5))
    events = timeline.of_rank(draw(st.integers(0, schedule.num_ranks - 1)))
    pairs = [(first.op, second.op) for first in events for second in events if first.end <= second.start]
    pairs = [(first, second) for first, second in pairs if first != second]
    if not pairs:
        return schedule
    first, second = draw(st.sampled_from(pairs))
    return waiting(schedule, second, (*schedule.waits.get(second, ()), first))


@st.composite
def waiting_for_any(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """An op waits for any other, of its own rank or not."""
    ops = [op for _, _, op in schedule.ops()]
    if not ops:
        return schedule
    op, other = draw(st.sampled_from(ops)), draw(st.sampled_from(ops))
    return waiting(schedule, op, (*schedule.waits.get(op, ()), other))


@st.composite
def waiting_less(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """A wait is left out."""
    waits = [(op, other) for op, awaited in schedule.waits.items() for other in awaited]
    if not waits:
        return schedule
    op, gone = draw(st.sampled_from(waits))
    return waiting(schedule, op, tuple(other for other in schedule.waits[op] if other != gone))


@st.composite
def reordered(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """An op moves within its lane."""
    places = [(rank, lane) for rank in range(schedule.num_ranks) for lane in Lane if schedule.lane(rank, lane)]
    if not places:
        return schedule
    rank, lane = draw(st.sampled_from(places))
    ops = list(schedule.lane(rank, lane))
    op = ops.pop(draw(st.integers(0, len(ops) - 1)))
    ops.insert(draw(st.integers(0, len(ops))), op)
    return with_lane(schedule, rank, lane, tuple(ops))


@st.composite
def moved_to_a_lane(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """An op goes to the end of any lane of any rank."""
    places = [(rank, lane) for rank in range(schedule.num_ranks) for lane in Lane if schedule.lane(rank, lane)]
    if not places:
        return schedule
    rank, lane = draw(st.sampled_from(places))
    ops = list(schedule.lane(rank, lane))
    op = ops.pop(draw(st.integers(0, len(ops) - 1)))
    schedule = with_lane(schedule, rank, lane, tuple(ops))
    rank, lane = draw(st.integers(0, schedule.num_ranks - 1)), draw(st.sampled_from(Lane))
    return with_lane(schedule, rank, lane, (*schedule.lane(rank, lane), op))


@st.composite
def of_another_kind(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """An op becomes one of any kind, stage and microbatch near it, its waits with it."""
    places = [(rank, lane, op) for rank, lane, op in schedule.ops()]
    if not places:
        return schedule
    rank, lane, op = draw(st.sampled_from(places))
    other = Op(
        draw(st.integers(0, schedule.num_stages)),
        draw(st.sampled_from(Kind)),
        draw(st.one_of(st.none(), st.integers(0, schedule.num_microbatches))),
        draw(st.one_of(st.none(), st.integers(0, 2))),
        draw(st.one_of(st.none(), st.none(), st.integers(0, schedule.num_stages))),
    )
    ops = tuple(other if one == op else one for one in schedule.lane(rank, lane))
    renamed = with_lane(schedule, rank, lane, ops)
    waits = {
        other if waiter == op else waiter: tuple(other if one == op else one for one in awaited)
        for waiter, awaited in schedule.waits.items()
    }
    return dataclasses.replace(renamed, waits=waits)


CHANGES = (waiting_for_any, waiting_less, reordered, moved_to_a_lane, of_another_kind)


def waiting(schedule: Schedule, op: Op, awaited: tuple[Op, ...]) -> Schedule:
    return dataclasses.replace(schedule, waits={**schedule.waits, op: awaited})
