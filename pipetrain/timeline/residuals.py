"""Two timelines of one schedule, op by op: what each kind took more or less than was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.messages import partner_of
from pipetrain.schedule.op import Kind, Lane, Op


@dataclass(frozen=True)
class Residual:
    """All ops of one kind. Seconds are means over them; a hop counts as its RECV."""

    kind: Kind
    num_ops: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def residual_seconds(self) -> float:
        """What one op took more than predicted; negative: less."""
        return self.measured_seconds - self.predicted_seconds


def residuals(predicted: Timeline, measured: Timeline) -> tuple[Residual, ...]:
    """One record per kind of op that both timelines have, in the order of `Kind`."""
    expected, taken = op_seconds(predicted), op_seconds(measured)
    found = []
    for kind in Kind:
        ops = [op for op in expected if op.kind is kind and op in taken]
        if ops:
            before, after = (statistics.fmean(seconds[op] for op in ops) for seconds in (expected, taken))
            found.append(Residual(kind, len(ops), before, after))
    return tuple(found)


def op_seconds(timeline: Timeline) -> dict[Op, float]:
    """Seconds of each op that computes, of each hop under its RECV, and of each REDUCE_GRAD.

    A hop lasts from the moment when both ends are ready (sent and posted) to the arrival, and a REDUCE_GRAD from when both are to the
    sum; where the other end left no event, there is no entry.
    """
    by_op = {event.op: event for event in timeline.events}
    return dict(_seconds(timeline.events, by_op))


def _seconds(events: Iterable[OpEvent], by_op: Mapping[Op, OpEvent]) -> Iterable[tuple[Op, float]]:
    for event in events:
        if event.op.kind.computes:
            yield event.op, event.end - event.start
        elif event.lane in (Lane.RECV, Lane.REDUCE):
            other = by_op.get(partner_of(event.op))
            if other is not None:
                # clocks of two ranks agree to some microseconds only, so a fast hop may seem to end before it began
                yield event.op, max(event.end - max(other.start, event.start), 0.0)
