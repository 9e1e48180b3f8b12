"""The pass of `pipeline.schedule=auto` where R has a lane of its own: an R starts no earlier than where the order has it.

    order of a rank           F0 F1 F2 R1 B0 F3 R2 B1 ...
    compute                   F0 F1 F2 B0 F3 B1 ...
    recompute                 R1 R2 ...                     R2 waits for F3, also where a place is free before

Its own waits let an R start as soon as there is a place. Where the rank then waits for a message that comes before the R ends,
the next op starts late. With this pass no op starts later than in a run of the whole order, one op after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pipetrain.schedule.families import ComputeLanes
from pipetrain.schedule.kinds import RECOMPUTE
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import AllKept
from pipetrain.schedule.schedule import Schedule


def hold_back(schedule: Schedule, ordered: Sequence[Sequence[Op]]) -> Schedule:
    """`schedule`, made of the lanes `ordered`, in which each R also waits for the op in front of it there."""
    if schedule.policy.mode is not Mode.OVERLAP:
        return schedule  # R stands in the compute lane itself
    waits = dict(schedule.waits)
    for lane in ordered:
        before = None
        for op in lane:
            if op.kind is not RECOMPUTE:
                before = op
            elif before is not None:
                waits[op] = tuple(dict.fromkeys((*waits.get(op, ()), before)))
    return dataclasses.replace(schedule, waits=waits)


def order_of(schedule: Schedule) -> ComputeLanes:
    """The ops of each rank one after the other; an R on a lane of its own stands where it may start, whatever the timing.

    So `hold_back` makes it wait for nothing that it does not wait for in `schedule`.
    """
    lanes = [list(_merged(schedule, rank)) for rank in range(schedule.num_ranks)]
    return lanes if any(op.kind is RECOMPUTE for lane in lanes for op in lane) else AllKept(lanes)


def _merged(schedule: Schedule, rank: int) -> Iterator[Op]:
    late = list(reversed(schedule.lane(rank, Lane.RECOMPUTE)))
    ended: set[Op] = set()
    compute = schedule.lane(rank, Lane.COMPUTE)
    own = set(compute)
    for op in compute:
        yield op
        ended.add(op)
        while late and own.intersection(schedule.waits.get(late[-1], ())) <= ended:
            yield late.pop()
