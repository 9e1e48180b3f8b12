"""Two timelines of one schedule, op by op: what each kind took more or less than was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from pipetrain.schedule.events import Timeline
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


def residuals(predicted: Timeline, *measured: Timeline) -> tuple[Residual, ...]:
    """One record per kind of op that the prediction has and what was measured, on one replica or on each of several, in the order
    of `Kind`."""
    expected = op_seconds(predicted)
    found = []
    taken = [op_seconds(timeline, beside=measured) for timeline in measured]
    for kind in Kind:
        pairs = [(expected[op], of[op]) for of in taken for op in expected if op.kind is kind and op in of]
        if pairs:
            before, after = (statistics.fmean(seconds) for seconds in zip(*pairs))
            found.append(Residual(kind, len(pairs), before, after))
    return tuple(found)


def op_seconds(timeline: Timeline, *, beside: Iterable[Timeline] = ()) -> dict[Op, float]:
    """Seconds of each op that computes, of each hop under its RECV, and of each REDUCE_GRAD.

    A hop lasts from the moment when both ends are ready (sent and posted) to the arrival, and a REDUCE_GRAD from when all that add up
    are to the sum: two stages, or the same stage of all replicas, whose timelines are `beside`. One of several that a rank has
    for its replicas is charged from the end of the one before, as they share the way. Where the other end left no event, there is
    no entry.
    """
    by_op = {event.op: event for event in timeline.events}
    whole: dict[Op, float] = {}  # when the gradients of each bucket were whole in the last replica
    for one in (timeline, *beside):
        for event in one.events:
            if event.op.is_replica_allreduce:
                whole[event.op] = max(event.start, whole.get(event.op, event.start))
    seconds: dict[Op, float] = {}
    ended: dict[int, float] = {}  # per rank, the sum before
    for event in timeline.events:
        if event.op.kind.computes:
            seconds[event.op] = event.end - event.start
        elif event.op.is_replica_allreduce:
            begin = max(whole[event.op], ended.get(event.rank, float("-inf")))
            ended[event.rank] = event.end
            seconds[event.op] = max(event.end - begin, 0.0)
        elif event.lane in (Lane.RECV, Lane.REDUCE) and (other := by_op.get(partner_of(event.op))) is not None:
            # clocks of two ranks agree to some microseconds only, so a fast hop may seem to end before it began
            seconds[event.op] = max(event.end - max(other.start, event.start), 0.0)
    return seconds
