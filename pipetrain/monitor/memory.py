"""What a rank holds over time, from the events of a simulated or measured step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from fractions import Fraction
from typing import TypeVar

from pipetrain.schedule.alive import OPENS_STASH, brings_set, ends_stash, places_freed, places_taken
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.schedule import Schedule

_Count = TypeVar("_Count", int, float, Fraction)
Curve = list[tuple[float, float]]  # (time, held from then on)


def sets_over_time(schedule: Schedule, events: Iterable[OpEvent]) -> list[tuple[float, float]]:
    """The number of sets alive after each change, with its time: a set comes with F (kept) or R and goes with B or W.

    Of a stage that is recomputed in parts, each is its part of a set.
    """
    changes = []
    for event in events:
        parts = schedule.policy.num_parts(event.op.stage)
        if taken := places_taken(schedule, event.op):
            changes.append((event.start, Fraction(taken, parts)))
        elif freed := places_freed(schedule, event.op):
            changes.append((event.end, -Fraction(freed, parts)))
    return [(time, int(count) if count.denominator == 1 else float(count)) for time, count in _running(changes)]


def stash_over_time(schedule: Schedule, events: Iterable[OpEvent]) -> list[tuple[float, int]]:
    """The microbatches between F and the end of their backward after each change, with its time."""
    own = [event for event in events if event.op.stage >= schedule.first_backward]
    changes = [(event.start, 1) for event in own if event.op.kind in OPENS_STASH]
    changes += [(event.end, -1) for event in own if ends_stash(event.op)]
    return _running(changes)


def bytes_over_time(schedule: Schedule, events: Iterable[OpEvent], costs: Costs) -> Curve:
    """Bytes of sets; and of those that are recomputed, from F on, of the stashed inputs and the outputs that are kept for R (which are
    part of the set).

    Each part of a stage has an input, taken to be as large as that of the stage.
    """
    changes = []
    for event in events:
        op, stage = event.op, event.op.stage
        stash, whole = costs.input_bytes[stage], costs.set_bytes[stage]
        kept = costs.kept_bytes[stage] if costs.kept_bytes else 0.0
        if op.kind in OPENS_STASH and stage >= schedule.first_backward:
            inputs = stash * schedule.policy.num_parts(stage) + kept
            changes.append((event.start, whole if brings_set(schedule, op) else inputs))
        elif places_taken(schedule, op):
            share = schedule.policy.share_of(stage, op.part)
            changes.append((event.start, (whole - kept) * share - stash))
        elif places_freed(schedule, op):
            changes.append((event.end, -whole * schedule.policy.share_of(stage, op.part)))
    return _running(changes)


def _running(changes: list[tuple[float, _Count]]) -> list[tuple[float, _Count]]:
    """How many there are after each change, in the order of time; of one moment what goes comes first."""
    in_order = sorted(changes)
    return list(zip((time for time, _ in in_order), itertools.accumulate(change for _, change in in_order)))
