"""The pass of reduces: where two stages share a parameter, each has a copy, and the two add up what they gave it.

    rank 3   compute  ... 3B6 3F7 3B7                        the last stage is done first
             reduce                   3REDUCE_GRAD.0>0 ====|
    rank 0   compute  0F0 ...            0B5 0B6 0B7       |  both end together, with the sum of both
             reduce                             0REDUCE_GRAD.0>3

    [1] a REDUCE_GRAD waits for the last op of its stage that may add to a gradient   3REDUCE_GRAD.0>0 <- 3B7
    [2] all ranks go through the buckets in one order, the pair whose lower stage is done first in front

Nothing waits for a REDUCE_GRAD but the end of the step, so none can hold up an op, and by [2] no two can stand in each
other's way. Where both stages live on one rank there is one parameter, and nothing to add up.
"""

from __future__ import annotations

import dataclasses

from pipetrain.schedule.kinds import GIVES_GRADIENTS, REDUCING
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule

(_REDUCE,) = REDUCING


def reduces_of(schedule: Schedule) -> tuple[Op, ...]:
    """All REDUCE_GRAD that the ties of its stages ask for, in the order in which every rank has its own."""
    ranks = schedule.stage_ranks
    return tuple(
        Op(stage, _REDUCE, None, bucket, other)
        for bucket, (low, high) in enumerate(schedule.tied)
        if low >= schedule.first_backward and ranks[low] != ranks[high]
        for stage, other in ((high, low), (low, high))
    )


def last_gradient(schedule: Schedule, stage: int) -> Op | None:
    """The last op of `stage` that may add to the gradients of its parameters; None: it has no backward."""
    compute = schedule.lane(schedule.stage_ranks[stage], Lane.COMPUTE)
    return next((op for op in reversed(compute) if op.stage == stage and op.kind in GIVES_GRADIENTS), None)


def add_reduces(schedule: Schedule) -> Schedule:
    """`schedule` with the REDUCE_GRAD of its ties, and their waits; all else stays as it is."""
    reduces = reduces_of(schedule)
    if not reduces:
        return schedule
    own: list[list[Op]] = [[] for _ in range(schedule.num_ranks)]
    waits = dict(schedule.waits)
    for op in reduces:
        own[schedule.stage_ranks[op.stage]].append(op)
        last = last_gradient(schedule, op.stage)
        if last is not None:
            waits[op] = (last,)  # [1]
    lanes = tuple({**lanes, Lane.REDUCE: tuple(ops)} if ops else lanes for lanes, ops in zip(schedule.lanes, own))
    return dataclasses.replace(schedule, lanes=lanes, waits=waits)


def with_ties(schedule: Schedule, tied: tuple[tuple[int, int], ...]) -> Schedule:
    """`schedule`, made without a word of the model, for one in which the stages of `tied` share parameters."""
    if schedule.tied == tied:
        return schedule
    assert not schedule.tied, f"a schedule of ties {schedule.tied} was given for {tied}"
    return dataclasses.replace(add_reduces(dataclasses.replace(schedule, tied=tied)), launch_order=())
