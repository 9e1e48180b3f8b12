"""How many results the hosts of a launched schedule hold for SENDs, counted from the definition."""

from __future__ import annotations

from collections.abc import Iterator

from pipetrain.schedule.kinds import MESSAGE_LANES
from pipetrain.schedule.messages import send_of
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.schedule import Schedule


def most_held_for_sends(schedule: Schedule) -> dict[tuple[int, Kind], int]:
    """Of each stage and kind of SEND, the most results at once: from their op until one of the compute lane that comes after
    their SEND is launched."""
    most: dict[tuple[int, Kind], int] = {}
    before = dict(predecessors(schedule))
    for launched in schedule.launch_order:
        held: dict[tuple[int, Kind], set[Op]] = {}
        ancestors: dict[Op, frozenset[Op]] = {}
        for op in launched:
            awaited = (*schedule.waits.get(op, ()), *before.get(op, ()))
            ancestors[op] = frozenset(awaited).union(*(ancestors[other] for other in awaited))
            if op.kind.row.lane is Lane.COMPUTE:
                for results in held.values():
                    results -= ancestors[op]
            if (send := send_of(schedule, op)) is not None:
                results = held.setdefault((send.stage, send.kind), set())
                results.add(send)
                most[send.stage, send.kind] = max(most.get((send.stage, send.kind), 0), len(results))
    return most


def predecessors(schedule: Schedule) -> Iterator[tuple[Op, tuple[Op]]]:
    """Of each op the one before it in its queue."""
    last: dict[object, Op] = {}
    for rank, lane, op in schedule.ops():
        queue = (rank, lane, op.stage, op.kind) if lane in MESSAGE_LANES else (rank, lane)
        if queue in last:
            yield op, (last[queue],)
        last[queue] = op
