"""What a rank holds over time, from the events of a simulated or measured step."""

from __future__ import annotations

from collections.abc import Iterable

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Kind
from pipetrain.schedule.schedule import Schedule

Curve = list[tuple[float, float]]  # (time, held from then on)


def sets_over_time(schedule: Schedule, events: Iterable[OpEvent]) -> list[tuple[float, int]]:
    """The number of sets alive after each change, with its time: a set comes with F (kept) or R and goes with B."""
    changes = []
    for event in events:
        is_kept = (event.op.stage, event.op.microbatch) in schedule.kept
        if event.op.kind is Kind.R or (event.op.kind is Kind.F and is_kept):
            changes.append((event.start, 1))
        elif event.op.kind is Kind.B:
            changes.append((event.end, -1))
    alive, counts = 0, []
    for time, change in sorted(changes):
        alive += change
        counts.append((time, alive))
    return counts


def bytes_over_time(schedule: Schedule, events: Iterable[OpEvent], costs: Costs) -> Curve:
    """Bytes of sets, and of the stashed inputs of those that are recomputed (from F to B; they are part of the set)."""
    changes = []
    for event in events:
        stage, kind = event.op.stage, event.op.kind
        stash, whole = costs.input_bytes[stage], costs.set_bytes[stage]
        is_kept = (stage, event.op.microbatch) in schedule.kept
        if kind is Kind.F and stage >= schedule.first_backward:
            changes.append((event.start, whole if is_kept else stash))
        elif kind is Kind.R:
            changes.append((event.start, whole - stash))
        elif kind is Kind.B:
            changes.append((event.end, -whole))
    held, curve = 0.0, []
    for time, change in sorted(changes):
        held += change
        curve.append((time, held))
    return curve
