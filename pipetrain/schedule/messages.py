"""The comm pass: a send and a receive for each boundary tensor, in the same order on both ends.

    rank 0  compute  0F0 0F1 ...            rank 1  recv     1RECV_F0 1RECV_F1 ...
            send     0SEND_F0 0SEND_F1 ...          compute  1F0 1F1 ...

Sends stand in the order of the ops that produce, receives in the order of those that consume. Neighbours on one rank
hand over in memory: no message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.schedule import Schedule


def crosses(schedule: Schedule, stage: int) -> bool:
    """Whether `stage` and the next one exist and live on different ranks."""
    ranks = schedule.stage_ranks
    return 0 <= stage < len(ranks) - 1 and ranks[stage] != ranks[stage + 1]


def receive_of(schedule: Schedule, op: Op) -> Op | None:
    """The receive that F or B `op` consumes, if its input comes by message."""
    if op.kind is Kind.F and crosses(schedule, op.stage - 1):
        return Op(op.stage, Kind.RECV_F, op.microbatch)
    if op.kind is Kind.B and crosses(schedule, op.stage):
        return Op(op.stage, Kind.RECV_B, op.microbatch)
    return None


def send_of(schedule: Schedule, op: Op) -> Op | None:
    """The send of what F or B `op` produces, if another rank needs it."""
    if op.kind is Kind.F and crosses(schedule, op.stage):
        return Op(op.stage, Kind.SEND_F, op.microbatch)
    if op.kind is Kind.B and op.stage > schedule.first_backward and crosses(schedule, op.stage - 1):
        return Op(op.stage, Kind.SEND_B, op.microbatch)
    return None


def local_source(schedule: Schedule, op: Op) -> Op | None:
    """The F or B on the same rank whose result `op` reads, where there is no message."""
    neighbour = op.stage - 1 if op.kind is Kind.F else op.stage + 1
    if not 0 <= neighbour < schedule.num_stages:
        return None
    if schedule.stage_ranks[neighbour] != schedule.stage_ranks[op.stage]:
        return None
    return Op(neighbour, op.kind, op.microbatch)


def partner_of(op: Op) -> Op:
    """The receive that meets the send `op`, or the send that meets the receive."""
    kind, step = {
        Kind.SEND_F: (Kind.RECV_F, 1),
        Kind.RECV_F: (Kind.SEND_F, -1),
        Kind.SEND_B: (Kind.RECV_B, -1),
        Kind.RECV_B: (Kind.SEND_B, 1),
    }[op.kind]
    return Op(op.stage + step, kind, op.microbatch)


def add_messages(schedule: Schedule) -> Schedule:
    """`schedule` with its sends and receives."""

    def lower(compute: Sequence[Op]) -> dict[Lane, tuple[Op, ...]]:
        sends = tuple(send for op in compute if (send := send_of(schedule, op)) is not None)
        receives = tuple(receive for op in compute if (receive := receive_of(schedule, op)) is not None)
        return {Lane.SEND: sends, Lane.RECV: receives}

    lanes = tuple({**lanes, **lower(lanes[Lane.COMPUTE])} for lanes in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes)
