"""What opens and closes a set or a stash, and how much a stage may hold at once, whatever the timing.

The bounds hold for every order of starts and ends that the waits and queues allow. The launch order of a host is such an order. So they
also hold if a host launches a device's ops far ahead, and allocates and frees memory in launch order.

An output that waits for its SEND counts neither as a set nor as stash. `launches.py` bounds the number of such outputs, except in GPipe
whose last stage alternates F and B.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter

from pipetrain.schedule.kinds import COPY_LANES, OFFLOAD, RECOMPUTE, RELOAD, Direction, Holding, kinds_where
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule

OPENS_STASH = kinds_where(lambda row: Holding.STASH in row.allocates)
CLOSES_STASH = kinds_where(lambda row: Holding.STASH in row.frees)
KEEPS_SET = kinds_where(lambda row: Holding.KEPT_SET in row.allocates)
ENDS_SET = kinds_where(lambda row: Holding.KEPT_SET in row.frees)


def brings_set(schedule: Schedule, op: Op) -> bool:
    """Whether `op` brings a set to the device: an R or RELOAD does, and an F whose set is kept or offloaded."""
    if op.kind is RECOMPUTE or op.kind is RELOAD:
        return True
    place = op.stage, op.microbatch
    return op.kind in KEEPS_SET and (place in schedule.kept or place in schedule.offloaded)


def ends_stash(op: Op) -> bool:
    """Whether the stage holds nothing of the microbatch once `op` has ended. If B runs in parts, the B of part 0 is the last."""
    return op.kind in CLOSES_STASH and not op.part


def places_taken(schedule: Schedule, op: Op) -> int:
    """How many activation slots `op` takes at its start: one for a part; for a whole set, as many as its stage has parts."""
    return _places(schedule, op) if brings_set(schedule, op) else 0


def places_freed(schedule: Schedule, op: Op) -> int:
    """How many activation slots `op` frees at its end."""
    return _places(schedule, op) if op.kind in ENDS_SET or op.kind is OFFLOAD else 0


def _places(schedule: Schedule, op: Op) -> int:
    return schedule.policy.num_parts(op.stage) if op.part is None else 1


def as_sets(schedule: Schedule, stage: int, places: int) -> float:
    """Converts a number of activation slots of `stage` into sets; a whole number of sets is an int."""
    sets, rest = divmod(places, schedule.policy.num_parts(stage))
    return sets if not rest else places / schedule.policy.num_parts(stage)


@dataclass(frozen=True)
class SetPeak:
    """The most sets of one stage that are alive at once, and their activation slots (`places`). `op` takes the last slot."""

    sets: float
    places: int
    op: Op


def peak_sets(schedule: Schedule) -> tuple[SetPeak, ...]:
    """Per stage, the worst over all timings that the schedule allows.

    A kept set lives from the start of its F to the end of its B (or W), a recomputed set from the start of its R. The ops of the
    compute lane run one after the other, so a number c stands for a moment: c of them have ended. By then the recompute lane
    may have started each R whose waits are among these c ops. The worst case is that it has started all of them. With copies see
    `_peaks_with_copies`.
    """
    peaks = [SetPeak(0, 0, schedule.way(Direction.FORWARD, stage, 0)[0]) for stage in range(schedule.num_stages)]
    for rank in range(schedule.num_ranks):
        alive = [0] * schedule.num_stages
        if schedule.order:
            for stage, peak in _peaks_with_copies(schedule, rank):
                peaks[stage] = max(peaks[stage], peak, key=lambda one: one.places)
            continue
        for op, starts in _moments(schedule, rank):
            alive[op.stage] += places_taken(schedule, op) if starts else -places_freed(schedule, op)
            if alive[op.stage] > peaks[op.stage].places:
                peaks[op.stage] = SetPeak(as_sets(schedule, op.stage, alive[op.stage]), alive[op.stage], op)
    return tuple(peaks)


def _moments(schedule: Schedule, rank: int) -> list[tuple[Op, bool]]:
    """Ops of a rank that begin (True) or end (False) a set, by the number of compute ops that have ended; ends come first."""
    compute = schedule.lane(rank, Lane.COMPUTE)
    place = {op: number for number, op in enumerate(compute)}
    moments: list[tuple[int, bool, Op]] = []
    for number, op in enumerate(compute):
        if brings_set(schedule, op):
            moments.append((number, True, op))
        elif op.kind in ENDS_SET:
            moments.append((number + 1, False, op))
    unlocked = 0
    for op in schedule.lane(rank, Lane.RECOMPUTE):
        ended = (place[other] + 1 for other in schedule.waits.get(op, ()) if other in place)
        unlocked = max(unlocked, *ended, 0)
        moments.append((unlocked, True, op))
    moments.sort(key=lambda moment: moment[:2])
    return [(op, starts) for _, starts, op in moments]


_CLOCK = (Lane.COMPUTE, *COPY_LANES)


def _ended_before(schedule: Schedule, rank: int) -> dict[Op, list[int]]:
    """For each op of a rank how many ops of COMPUTE, OFFLOAD and RELOAD have ended when it starts, whatever the timing."""
    lanes = {op: (lane, number) for lane in _CLOCK for number, op in enumerate(schedule.lane(rank, lane), 1)}
    graph = {op: schedule.comes_after(op) for own in schedule.lanes[rank].values() for op in own}
    starts: dict[Op, list[int]] = {}
    ends: dict[Op, list[int]] = {}
    for op in TopologicalSorter(graph).static_order():
        starts[op] = list(map(max, zip([0] * len(_CLOCK), *(ends[other] for other in graph.get(op, ())))))
        lane, number = lanes.get(op, (None, 0))
        ends[op] = [number if one is lane else ended for one, ended in zip(_CLOCK, starts[op])]
    return starts


def _peaks_with_copies(schedule: Schedule, rank: int) -> Iterator[tuple[int, SetPeak]]:
    """As `peak_sets`, for the stages of one rank. If an op is the nth of `Schedule.order` to take a slot,
    and k slots must have been freed before it starts, at most n - k are in use."""
    before, taken = _ended_before(schedule, rank), Counter[int]()
    freed = {
        stage: [
            _counts(places_freed(schedule, op) if op.stage == stage else 0 for op in schedule.lane(rank, lane))
            for lane in _CLOCK
        ]
        for stage, holder in enumerate(schedule.stage_ranks)
        if holder == rank
    }
    for op in schedule.order[rank]:
        if slots := places_taken(schedule, op):
            taken[op.stage] += slots
            alive = taken[op.stage] - sum(counts[ended] for counts, ended in zip(freed[op.stage], before[op]))
            yield op.stage, SetPeak(as_sets(schedule, op.stage, alive), alive, op)


def peak_on_host(schedule: Schedule, stage: int) -> tuple[int, Op | None]:
    """The most sets of `stage`, or of one of its parts, on the host at once, whatever the timing; and the OFFLOAD that reaches it."""
    before, rank = _ended_before(schedule, schedule.stage_ranks[stage]), schedule.stage_ranks[stage]
    down, held = [op for op in schedule.lane(rank, Lane.OFFLOAD) if op.stage == stage], list[tuple[int, Op]]()
    for part in {op.part for op in down}:
        back = _counts((op.stage, op.part) == (stage, part) for op in schedule.lane(rank, Lane.RELOAD))
        own = enumerate((op for op in down if op.part == part), 1)
        held += [(number - back[before[op][-1]], op) for number, op in own]
    return max(held, key=lambda pair: pair[0], default=(0, None))


def _counts(numbers: Iterable[int]) -> list[int]:
    """The sums of the first 0, 1, 2, ... numbers."""
    return list(itertools.accumulate(numbers, initial=0))


def peak_stash(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches between the start of F and the end of B, or W."""
    peaks, held = [0] * schedule.num_stages, [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for op in schedule.lane(rank, Lane.COMPUTE):
            if op.stage >= schedule.first_backward:
                held[op.stage] += (op.kind in OPENS_STASH) - ends_stash(op)
                peaks[op.stage] = max(peaks[op.stage], held[op.stage])
    return tuple(peaks)
