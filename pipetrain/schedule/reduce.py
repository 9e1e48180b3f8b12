"""The pass of reduces: sums the gradients of parameters that have copies, as soon as all backwards have added to them.

Over the replicas, one sum per stage; with `recompute.segments` one per part, the last part first:

    rank 1   compute  ... 1B2 1B3                            ... 1B3.2 1B3.1 1B3.0
             reduce               1REDUCE_GRAD.0                       1REDUCE_GRAD.2 1REDUCE_GRAD.1 1REDUCE_GRAD.0
    rank 0   compute  ...     0B2 0B3                        the same at the same places in every replica
             reduce                   0REDUCE_GRAD.0

If two stages share a parameter, each has a copy, and the two sum their gradients:

    rank 3   compute  ... 3B6 3F7 3B7                        the last stage is done first
             reduce                   3REDUCE_GRAD.0>0 ====|
    rank 0   compute  0F0 ...            0B5 0B6 0B7       |  both end together, with the sum of both
             reduce                             0REDUCE_GRAD.0>3

    [1] a REDUCE_GRAD waits for the last op that may add to one of its gradients   3REDUCE_GRAD.0>0 <- 3B7   1REDUCE_GRAD.2 <- 1B3.2
    [2] the REDUCE_GRAD over the replicas come in the order in which they become ready, so a ready one never waits for one that is not
    [3] REDUCE_GRAD of two stages follow those of [2], in one order on all ranks: first the pair whose lower stage ends first

Only the end of the step waits for a REDUCE_GRAD, so none can delay an op. All replicas have the same lanes, so by [2] they
start the same ones in the same order. By [3] no two ranks of a replica wait for each other. Stages on one rank need no sum.
A parameter that two stages share is only in their shared bucket, whose REDUCE_GRAD sums it over both stages of all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pipetrain.schedule.kinds import GIVES_GRADIENTS, REDUCING
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule, in_parts

(_REDUCE,) = REDUCING


def reduces_of(schedule: Schedule) -> tuple[Op, ...]:
    """All REDUCE_GRAD that replicas and ties need: [2] stage by stage, then [3] in the order that all ranks share."""
    ranks, found = schedule.stage_ranks, list(_over_replicas(schedule))
    for bucket, (low, high) in enumerate(schedule.tied):
        if low >= schedule.first_backward and ranks[low] != ranks[high]:
            found += [Op(stage, _REDUCE, None, bucket, other) for stage, other in ((high, low), (low, high))]
    return tuple(found)


def _over_replicas(schedule: Schedule) -> Iterator[Op]:
    if schedule.num_replicas > 1:
        for stage in range(schedule.first_backward, schedule.num_stages):
            num_parts = schedule.policy.num_parts(stage)
            whole = Op(stage, _REDUCE, None, 0)
            yield from (whole,) if num_parts == 1 else in_parts(whole, num_parts)


def gradients_of(schedule: Schedule, reduce: Op) -> tuple[Op, ...]:
    """The ops that may add to the gradients that `reduce` sums, in order: those of its part, and those of the whole stage."""
    part = _part_of(schedule, reduce)
    compute = schedule.lane(schedule.stage_ranks[reduce.stage], Lane.COMPUTE)
    own = (op for op in compute if op.stage == reduce.stage and op.kind in GIVES_GRADIENTS)
    return tuple(op for op in own if part is None or op.part in (None, part))


def _part_of(schedule: Schedule, reduce: Op) -> int | None:
    """The part of its stage whose gradients `reduce` sums; None: those of the whole stage."""
    return reduce.part if reduce.peer is None and schedule.policy.num_parts(reduce.stage) > 1 else None


def add_reduces(schedule: Schedule) -> Schedule:
    """`schedule` with the REDUCE_GRAD of its replicas and ties, and their waits; all else stays as it is."""
    reduces = reduces_of(schedule)
    if not reduces:
        return schedule
    ready = _ready(schedule, reduces)
    waits = {**schedule.waits, **{op: (last,) for op, (_, last) in ready.items()}}  # [1]
    own: list[list[Op]] = [[] for _ in range(schedule.num_ranks)]
    for op in (*in_turn(schedule), *(op for op in reduces if op.peer is not None)):
        own[schedule.stage_ranks[op.stage]].append(op)
    lanes = tuple({**lanes, Lane.REDUCE: tuple(ops)} if ops else lanes for lanes, ops in zip(schedule.lanes, own))
    return dataclasses.replace(schedule, lanes=lanes, waits=waits)


def in_turn(schedule: Schedule) -> list[Op]:
    """[2]: the REDUCE_GRAD over the replicas, per rank in the order in which the compute lane makes them ready.

    If one op makes several ready, the last part is first.
    """
    reduces = tuple(_over_replicas(schedule))
    ready = _ready(schedule, reduces)
    return sorted(reduces, key=lambda op: (ready[op][0] if op in ready else -1, -(op.part or 0)))


def _ready(schedule: Schedule, reduces: Sequence[Op]) -> dict[Op, tuple[int, Op]]:
    """For each REDUCE_GRAD the last op that may add to its gradients, with its position in its compute lane; no entry if no op does."""
    last: dict[tuple[int, int | None], tuple[int, Op]] = {}  # by stage and part; part None: of the whole stage
    for rank in range(schedule.num_ranks):
        for place, op in enumerate(schedule.lane(rank, Lane.COMPUTE)):
            if op.kind in GIVES_GRADIENTS:
                parts = range(schedule.policy.num_parts(op.stage)) if op.part is None else (op.part,)
                last |= {(op.stage, part): (place, op) for part in (None, *parts)}
    keys = {reduce: (reduce.stage, _part_of(schedule, reduce)) for reduce in reduces}
    return {reduce: last[key] for reduce, key in keys.items() if key in last}


def with_reduces(schedule: Schedule, tied: tuple[tuple[int, int], ...] = (), num_replicas: int = 1) -> Schedule:
    """`schedule` for a model in which the stages of `tied` share parameters, run by `num_replicas` replicas.

    It may have been made without ties and for one replica. One that was made for several replicas keeps its REDUCE_GRAD if there
    are again several, in whatever number.
    """
    if schedule.tied != tied:
        assert not schedule.tied, f"a schedule of ties {schedule.tied} was given for {tied}"
    elif (schedule.num_replicas > 1) == (num_replicas > 1):
        same = schedule.num_replicas == num_replicas
        return schedule if same else dataclasses.replace(schedule, num_replicas=num_replicas)
    bare = dataclasses.replace(
        schedule,
        tied=tied,
        num_replicas=num_replicas,
        lanes=tuple({lane: ops for lane, ops in lanes.items() if lane is not Lane.REDUCE} for lanes in schedule.lanes),
        waits={op: awaited for op, awaited in schedule.waits.items() if op.kind is not _REDUCE},
        launch_order=(),
    )
    return add_reduces(bare)
