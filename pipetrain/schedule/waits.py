"""The pass of waits: what each op waits for in other lanes.

    [1] F waits for its input, B for its gradient          1F0 <- 1RECV_F0      1B0 <- 1RECV_B0
    [2] B waits for its set                                1B1 <- 1R1
    [3] R waits for its F and for a free place             1R2 <- 1F2, 1B1      (one recomputed set alive)
    [4] inline R waits for the gradient as well            1R2 <- 1RECV_B2
    [5] a send waits for what it sends                     1SEND_F0 <- 1F0
    [6] a receive waits until the tensor before is used    2RECV_F2 <- 2F0      (two tensors ahead)
        or not at all, while the stage will hold as many inputs at once anyway
    [7] gradients wait for the last activations         1RECV_B0 <- 1F6     (of 8 forwards, all before B0)

With a split backward I stands for B in [1], [2], [4] and [6], and W in [3]: a set is free when its W has ended.

Ops of the same lane need none: their order is the lane's. [1] between neighbours on one rank is written down all
the same, because there the order of the lane carries data from one stage to the other.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter

from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.kinds import RECOMPUTE, Direction
from pipetrain.schedule.messages import receive_of, send_of, source_of
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule

Wait = tuple[Op, Op]  # (op, what it waits for)


def add_waits(schedule: Schedule, transport_ahead: int = 2) -> Schedule:
    """`schedule` with its waits; at most `transport_ahead` tensors of a link are received and not yet used.

    The inputs that a stage stashes at once (all in GPipe, the warm-up in 1F1B) may all come early: the memory is theirs in any
    case, and as unsent outputs they would take as much on the sender. 0 posts a receive just in time: when the op before
    its consumer has ended.
    """
    waits: defaultdict[Op, list[Op]] = defaultdict(list)
    stash = peak_stash(schedule)
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        for op, awaited in (
            *_data_waits(schedule, compute),
            *_recompute_waits(schedule, rank),
            *_receive_waits(schedule, compute, transport_ahead, stash),
        ):
            waits[op].append(awaited)
    own = {op: op for _, _, op in schedule.ops()}  # the lanes' own objects: of many stages, equal ones would add up
    return dataclasses.replace(
        schedule,
        waits={
            own.get(op, op): tuple(own.get(one, one) for one in dict.fromkeys(awaited)) for op, awaited in waits.items()
        },
    )


def _data_waits(schedule: Schedule, compute: Iterable[Op]) -> Iterator[Wait]:
    for op in compute:
        source = source_of(schedule, op)
        if source is not None:
            yield op, source  # [1]
        send = send_of(schedule, op)
        if send is not None:
            yield send, op  # [5]


def _recompute_waits(schedule: Schedule, rank: int) -> Iterator[Wait]:
    if schedule.policy.mode is Mode.OVERLAP:
        yield from _overlapped_waits(schedule, rank)
    elif schedule.policy.mode is Mode.INLINE:
        for op in schedule.lane(rank, Lane.COMPUTE):
            if op.kind is RECOMPUTE:
                gradient = source_of(schedule, schedule.way(Direction.BACKWARD, op.stage, op.microbatch)[0])
                if gradient is not None:
                    yield op, gradient  # [4]


def _overlapped_waits(schedule: Schedule, rank: int) -> Iterator[Wait]:
    place = {op: number for number, op in enumerate(schedule.lane(rank, Lane.COMPUTE))}
    ends: defaultdict[int, list[tuple[int, Op]]] = defaultdict(list)  # of the sets before, by stage, in their order
    for op in schedule.lane(rank, Lane.RECOMPUTE):
        way = schedule.way(Direction.BACKWARD, op.stage, op.microbatch)
        yield way[0], op  # [2]
        yield op, Op(op.stage, op.kind.row.reads[0], op.microbatch)  # [3]
        before = ends[op.stage]
        if len(before) >= schedule.policy.ahead:
            yield op, before[-schedule.policy.ahead][1]  # [3]
        bisect.insort(before, (place.get(way[-1], len(place)), way[-1]), key=itemgetter(0))


def _receive_waits(schedule: Schedule, compute: tuple[Op, ...], ahead: int, stash: tuple[int, ...]) -> Iterator[Wait]:
    used: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)  # places of consumers, per queue of receives
    receives = [receive_of(schedule, op) for op in compute]
    # A rank has one way into the network. A gradient that no B can use before all F are done (in GPipe; in the others at
    # their end) would take it from the activations of the last F, so it may come when only one of these is on its way.
    fed = [place for place, receive in enumerate(receives) if receive is not None and _goes(receive, Direction.FORWARD)]
    for place, receive in enumerate(receives):
        if receive is None:
            continue
        consumers, after = used[receive.stage, receive.kind], []
        if ahead == 0:
            first_use = place - 1 if _recomputed_inline(schedule, compute, place) else place
            after += [first_use - 1] if first_use > 0 else []  # [6]
        else:
            held_anyway = stash[receive.stage] if _goes(receive, Direction.FORWARD) else 0
            if len(consumers) >= max(ahead, held_anyway):
                after.append(consumers[-ahead])  # [6]
            if _goes(receive, Direction.BACKWARD) and len(fed) > 1 and place > fed[-1]:
                after.append(fed[-2])  # [7]
        if after:
            yield receive, compute[max(after)]
        consumers.append(place)


def _goes(op: Op, direction: Direction) -> bool:
    return op.kind.row.direction is direction


def _recomputed_inline(schedule: Schedule, compute: tuple[Op, ...], place: int) -> bool:
    """Whether the op before `place` is the R that waits for the same gradient."""
    reader, before = compute[place], compute[place - 1] if place else None
    inline = schedule.policy.mode is Mode.INLINE and _goes(reader, Direction.BACKWARD)
    return inline and before == Op(reader.stage, RECOMPUTE, reader.microbatch)
