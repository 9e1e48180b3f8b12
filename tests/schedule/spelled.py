"""Schedules as the words of their ops: read, and changed word by word."""

from __future__ import annotations

import dataclasses

from random_schedules import with_lane

from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.schedule import Schedule


def lane(schedule: Schedule, rank: int, lane: Lane = Lane.COMPUTE) -> str:
    return " ".join(map(str, schedule.lane(rank, lane)))


def waits(schedule: Schedule, op: str) -> set[str]:
    return {str(other) for other in schedule.waits.get(Op.parse(op), ())}


def in_order(schedule: Schedule, kind: Kind) -> bool:
    """Whether each stage runs its ops of `kind` in microbatch order, so that gradients are summed as in one process."""
    own = [(op.stage, op.microbatch or 0) for _, _, op in schedule.ops() if op.kind is kind]
    return sorted(own, key=lambda one: one[0]) == sorted(own)


def reduces(schedule: Schedule) -> list[list[str]]:
    """Of each rank the reduce lane, each op with what it waits for."""
    return [
        [f"{op} <- {' '.join(map(str, schedule.waits.get(op, ())))}" for op in schedule.lane(rank, Lane.REDUCE)]
        for rank in range(schedule.num_ranks)
    ]


def ops(words: str) -> tuple[Op, ...]:
    return tuple(map(Op.parse, words.split()))


def with_words(
    schedule: Schedule, rank: int, words: str, waits: dict[str, str] | None = None, lane: Lane = Lane.REDUCE
) -> Schedule:
    """`schedule` with other ops in one lane, and other waits for some ops."""
    changed = {Op.parse(op): ops(awaited) for op, awaited in (waits or {}).items()}
    return dataclasses.replace(with_lane(schedule, rank, lane, ops(words)), waits={**schedule.waits, **changed})


def launched_early(schedule: Schedule) -> tuple[tuple[Op, ...], ...]:
    """Of each rank all ops, as a host launches them that goes by waits and queues alone: what may come first of messages, then R, then F and B."""
    orders = []
    for lanes in schedule.lanes:
        queues = (Lane.SEND, Lane.RECV, Lane.REDUCE, Lane.RECOMPUTE, Lane.COMPUTE)
        todo, order = [op for lane in queues for op in lanes.get(lane, ())], dict[Op, None]()
        while todo:
            order[next(op for op in todo if order.keys() >= {*schedule.comes_after(op)})] = None
            todo = [op for op in todo if op not in order]
        orders.append(tuple(order))
    return tuple(orders)
