"""What a rank holds over time, from the events of a simulated or measured step."""

from __future__ import annotations

from collections.abc import Iterable

from pipetrain.schedule.alive import CLOSES_STASH, ENDS_SET, OPENS_STASH, brings_set
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.schedule import Schedule

Curve = list[tuple[float, float]]  # (time, held from then on)


def sets_over_time(schedule: Schedule, events: Iterable[OpEvent]) -> list[tuple[float, int]]:
    """The number of sets alive after each change, with its time: a set comes with F (kept) or R and goes with B or W."""
    changes = []
    for event in events:
        if brings_set(schedule, event.op):
            changes.append((event.start, 1))
        elif event.op.kind in ENDS_SET:
            changes.append((event.end, -1))
    return _running(changes)


def stash_over_time(schedule: Schedule, events: Iterable[OpEvent]) -> list[tuple[float, int]]:
    """The microbatches between F and the end of their backward after each change, with its time."""
    own = [event for event in events if event.op.stage >= schedule.first_backward]
    changes = [(event.start, 1) for event in own if event.op.kind in OPENS_STASH]
    changes += [(event.end, -1) for event in own if event.op.kind in CLOSES_STASH]
    return _running(changes)


def bytes_over_time(schedule: Schedule, events: Iterable[OpEvent], costs: Costs) -> Curve:
    """Bytes of sets; and of those that are recomputed, from F on, of the stashed inputs and the outputs that are kept for R (which are
    part of the set)."""
    changes = []
    for event in events:
        op, stage = event.op, event.op.stage
        whole = costs.set_bytes[stage]
        stash = min(costs.input_bytes[stage] + (costs.kept_bytes[stage] if costs.kept_bytes else 0.0), whole)
        if op.kind in OPENS_STASH and stage >= schedule.first_backward:
            changes.append((event.start, whole if brings_set(schedule, op) else stash))
        elif brings_set(schedule, op):
            changes.append((event.start, whole - stash))
        elif op.kind in ENDS_SET:
            changes.append((event.end, -whole))
    held, curve = 0.0, []
    for time, change in sorted(changes):
        held += change
        curve.append((time, held))
    return curve


def _running(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """How many there are after each change, in the order of time; of one moment what goes comes first."""
    alive, counts = 0, []
    for time, change in sorted(changes):
        alive += change
        counts.append((time, alive))
    return counts
