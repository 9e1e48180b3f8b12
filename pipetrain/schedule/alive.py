"""What opens and closes a set or a stash, and how much a stage may hold at once, whatever the timing.

The bounds hold for every order of starts and ends that the waits and queues allow. The launch order of a host is such an order. So they
also hold if a host launches a device's ops far ahead, and allocates and frees memory in launch order.

An output that waits for its SEND counts neither as a set nor as stash. `launches.py` bounds the number of such outputs, except in GPipe
whose last stage alternates F and B.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
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


@dataclass(frozen=True)
class SetPeak:
    """The most sets of one stage that are alive at once, and their activation slots (`places`). `op` takes the last slot."""

    sets: float
    places: int
    op: Op


def peak_sets(schedule: Schedule) -> tuple[SetPeak, ...]:
    """Per stage, the worst over all timings that the schedule allows.

    A kept set lives from the start of its F to the end of its B (or W), a recomputed set from the start of its R, an offloaded one
    from its F to the end of OFFLOAD and again from the start of RELOAD. If an op is the nth of `slot_order` to take a slot, and k
    slots must have been freed before it starts, at most n - k are in use.
    """
    peaks = [SetPeak(0, 0, schedule.way(Direction.FORWARD, stage, 0)[0]) for stage in range(schedule.num_stages)]
    for rank in range(schedule.num_ranks):
        before, taken = ended_before(schedule, rank), Counter[int]()
        freed = defaultdict[tuple[int, Lane], list[int]](
            list
        )  # for each slot, how many ops of the lane end until it is free
        for lane in _CLOCK:
            for number, op in enumerate(schedule.lane(rank, lane), 1):
                freed[op.stage, lane] += [number] * places_freed(schedule, op)
        for op in slot_order(schedule, rank):
            if slots := places_taken(schedule, op):
                taken[op.stage] += slots
                free = (bisect.bisect(freed[op.stage, lane], ended) for lane, ended in zip(_CLOCK, before[op]))
                alive = taken[op.stage] - sum(free)
                if alive > peaks[op.stage].places:
                    sets, rest = divmod(alive, parts := schedule.policy.num_parts(op.stage))
                    peaks[op.stage] = SetPeak(alive / parts if rest else sets, alive, op)
    return tuple(peaks)


def slot_order(schedule: Schedule, rank: int) -> list[Op]:
    """The ops of a rank in the order in which they take slots. An R of the recompute lane comes after the last compute op that it waits for."""
    if schedule.order:
        return list(schedule.order[rank])
    compute, late = schedule.lane(rank, Lane.COMPUTE), list(reversed(schedule.lane(rank, Lane.RECOMPUTE)))
    own, ended, order = set(compute), set[Op](), list[Op]()
    for op in compute:
        order.append(op)
        ended.add(op)
        while late and own.intersection(schedule.waits.get(late[-1], ())) <= ended:
            order.append(late.pop())
    return order


_CLOCK = (Lane.COMPUTE, *COPY_LANES)


def ended_before(schedule: Schedule, rank: int) -> dict[Op, list[int]]:
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


def peak_on_host(schedule: Schedule, stage: int) -> tuple[int, Op | None]:
    """The most sets of `stage`, or of one of its parts, on the host at once, whatever the timing; and the OFFLOAD that reaches it."""
    before, rank = ended_before(schedule, schedule.stage_ranks[stage]), schedule.stage_ranks[stage]
    down, held = [op for op in schedule.lane(rank, Lane.OFFLOAD) if op.stage == stage], list[tuple[int, Op]]()
    for part in {op.part for op in down}:
        reloads = enumerate(schedule.lane(rank, Lane.RELOAD), 1)
        back = [number for number, op in reloads if (op.stage, op.part) == (stage, part)]
        own = enumerate((op for op in down if op.part == part), 1)
        held += [(number - bisect.bisect(back, before[op][-1]), op) for number, op in own]
    return max(held, key=lambda pair: pair[0], default=(0, None))


def peak_stash(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches between the start of F and the end of B, or W."""
    peaks, held = [0] * schedule.num_stages, [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for op in schedule.lane(rank, Lane.COMPUTE):
            if op.stage >= schedule.first_backward:
                held[op.stage] += (op.kind in OPENS_STASH) - ends_stash(op)
                peaks[op.stage] = max(peaks[op.stage], held[op.stage])
    return tuple(peaks)
