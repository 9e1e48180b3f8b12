"""The edge pass: what each op waits for in other lanes.

    [1] F waits for its input, B for its gradient          1F0 <- 1RECV_F0      1B0 <- 1RECV_B0
    [2] B waits for its set                                1B1 <- 1R1
    [3] R waits for its F and for a free place             1R2 <- 1F2, 1B1      (one recomputed set alive)
    [4] inline R waits for the gradient as well            1R2 <- 1RECV_B2
    [5] a send waits for what it sends                     1SEND_F0 <- 1F0
    [6] a receive waits until the tensor before is used    2RECV_F2 <- 2F0      (two tensors ahead)
        or not at all, while the stage will hold as many inputs at once anyway
    [7] gradients wait for the last activations         1RECV_B0 <- 1F6     (of 8 forwards, all before B0)

Ops of the same lane need no edge: their order is the lane's. [1] between neighbours on one rank is written down all
the same, because there the order of the lane carries data from one stage to the other.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator

from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.messages import local_source, receive_of, send_of
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule

Edge = tuple[Op, Op]  # (op, what it waits for)


def add_edges(schedule: Schedule, transport_ahead: int = 2) -> Schedule:
    """`schedule` with its edges; at most `transport_ahead` tensors of a link are received and not yet used.

    The inputs that a stage stashes at once (all in GPipe, the warm-up in 1F1B) may all come early: the memory is theirs in any
    case, and as unsent outputs they would take as much on the sender. 0 posts a receive just in time: when the op before
    its consumer has ended.
    """
    waits: defaultdict[Op, list[Op]] = defaultdict(list)
    stash = peak_stash(schedule)
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        for op, awaited in (
            *_data_edges(schedule, compute),
            *_recompute_edges(schedule, rank),
            *_receive_edges(schedule, compute, transport_ahead, stash),
        ):
            waits[op].append(awaited)
    own = {op: op for _, _, op in schedule.ops()}  # the lanes' own objects: of many stages, equal ones would add up
    return dataclasses.replace(
        schedule,
        waits={own[op]: tuple(own[one] for one in dict.fromkeys(awaited)) for op, awaited in waits.items()},
    )


def _data_edges(schedule: Schedule, compute: Iterable[Op]) -> Iterator[Edge]:
    for op in compute:
        if op.kind is Kind.R:
            continue
        source = receive_of(schedule, op) or local_source(schedule, op)
        if source is not None:
            yield op, source  # [1]
        send = send_of(schedule, op)
        if send is not None:
            yield send, op  # [5]


def _recompute_edges(schedule: Schedule, rank: int) -> Iterator[Edge]:
    policy = schedule.policy
    own_lane = policy.mode is Mode.OVERLAP
    done: defaultdict[int, list[Op]] = defaultdict(list)
    for op in schedule.lane(rank, Lane.RECOMPUTE if own_lane else Lane.COMPUTE):
        if op.kind is not Kind.R:
            continue
        backward = Op(op.stage, Kind.B, op.microbatch)
        if own_lane:
            yield backward, op  # [2]
            yield op, Op(op.stage, Kind.F, op.microbatch)  # [3]
            before = done[op.stage]
            if len(before) >= policy.ahead:
                yield op, before[-policy.ahead]  # [3]
            before.append(backward)
        elif policy.mode is Mode.INLINE:
            gradient = receive_of(schedule, backward) or local_source(schedule, backward)
            if gradient is not None:
                yield op, gradient  # [4]


def _receive_edges(schedule: Schedule, compute: tuple[Op, ...], ahead: int, stash: tuple[int, ...]) -> Iterator[Edge]:
    used: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)  # places of consumers
    # A rank has one way into the network. A gradient that no B can use before all F are done (in GPipe; in the others at
    # their end) would take it from the activations of the last F, so it may come when only one of these is on its way.
    fed = [place for place, op in enumerate(compute) if op.kind is Kind.F and receive_of(schedule, op) is not None]
    for place, op in enumerate(compute):
        receive = None if op.kind is Kind.R else receive_of(schedule, op)
        if receive is None:
            continue
        consumers, after = used[op.stage, op.kind], []
        if ahead == 0:
            first_use = place - 1 if _recomputed_inline(schedule, compute, place) else place
            after += [first_use - 1] if first_use > 0 else []  # [6]
        else:
            if len(consumers) >= (max(ahead, stash[op.stage]) if op.kind is Kind.F else ahead):
                after.append(consumers[-ahead])  # [6]
            if op.kind is Kind.B and len(fed) > 1 and place > fed[-1]:
                after.append(fed[-2])  # [7]
        if after:
            yield receive, compute[max(after)]
        consumers.append(place)


def _recomputed_inline(schedule: Schedule, compute: tuple[Op, ...], place: int) -> bool:
    """Whether the op before `place` is the R that waits for the same gradient."""
    backward = compute[place]
    inline = schedule.policy.mode is Mode.INLINE and backward.kind is Kind.B
    return inline and place > 0 and compute[place - 1] == Op(backward.stage, Kind.R, backward.microbatch)
