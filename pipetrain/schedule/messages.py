"""The comm pass: a send and a receive for each boundary tensor, in the same order on both ends.

    rank 0  compute  0F0 0F1 ...            rank 1  recv     1RECV_F0 1RECV_F1 ...
            send     0SEND_F0 0SEND_F1 ...          compute  1F0 1F1 ...

Sends are in the order of the ops that write the tensors, receives in the order of the ops that read them. Between stages on one
rank there are no messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipetrain.schedule.kinds import Direction
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule


def reads_boundary(schedule: Schedule, op: Op) -> bool:
    """Whether `op` reads a boundary tensor, and not what another segment of its own stage wrote."""
    return op.part is None or op.part == schedule.policy.num_parts(op.stage) - 1


def writes_boundary(op: Op) -> bool:
    """Whether `op` writes a boundary tensor, and not the input of another segment of its own stage."""
    return not op.part


def source_of(schedule: Schedule, op: Op) -> Op | None:
    """The op that gives `op` its boundary tensor: a receive, or the op of the neighbouring stage on the same rank. None: it reads none."""
    row = op.kind.row
    if row.recv_kind is None or row.direction is None or not reads_boundary(schedule, op):
        return None
    neighbour = op.stage - row.direction
    if not 0 <= neighbour < schedule.num_stages:
        return None
    if _crosses(schedule, neighbour, op.stage):
        return Op(op.stage, row.recv_kind, op.microbatch)
    return giver_of(schedule, row.direction, neighbour, op.microbatch)


def receive_of(schedule: Schedule, op: Op) -> Op | None:
    """The receive whose tensor `op` uses, if it comes by message."""
    source = source_of(schedule, op)
    return source if source is not None and source.kind is op.kind.row.recv_kind else None


def send_of(schedule: Schedule, op: Op) -> Op | None:
    """The send of what `op` produces, if another rank needs it."""
    row = op.kind.row
    if row.send_kind is None or row.direction is None or not writes_boundary(op):
        return None
    to = op.stage + row.direction
    wanted = row.direction is Direction.FORWARD or to >= schedule.first_backward
    return Op(op.stage, row.send_kind, op.microbatch) if wanted and _crosses(schedule, op.stage, to) else None


def giver_of(schedule: Schedule, direction: Direction, stage: int, microbatch: int | None) -> Op:
    """Of the ops in which a microbatch passes `stage`, the one that gives the next stage its tensor."""
    way = schedule.way(direction, stage, microbatch)
    return next(op for op in way if op.kind.row.send_kind is not None and writes_boundary(op))


def _crosses(schedule: Schedule, stage: int, other: int) -> bool:
    """Whether both stages exist and live on different ranks."""
    ranks = schedule.stage_ranks
    return 0 <= stage < len(ranks) and 0 <= other < len(ranks) and ranks[stage] != ranks[other]


def partner_of(op: Op) -> Op:
    """The receive that meets the send `op`, the send that meets the receive, or the other end of a REDUCE_GRAD of two stages."""
    row = op.kind.row
    assert row.peer_kind is not None
    if op.peer is not None:
        return Op(op.peer, row.peer_kind, op.microbatch, op.part, op.stage)
    assert row.direction is not None
    step = row.direction if row.lane is Lane.SEND else -row.direction
    return Op(op.stage + step, row.peer_kind, op.microbatch)


def add_messages(schedule: Schedule) -> Schedule:
    """`schedule` with its sends and receives."""

    def lower(compute: Sequence[Op]) -> dict[Lane, tuple[Op, ...]]:
        sends = tuple(send for op in compute if (send := send_of(schedule, op)) is not None)
        receives = tuple(receive for op in compute if (receive := receive_of(schedule, op)) is not None)
        return {Lane.SEND: sends, Lane.RECV: receives}

    lanes = tuple({**lanes, **lower(lanes[Lane.COMPUTE])} for lanes in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes)
