"""What happened, op by op: the type that a simulation and a measured run both give."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from pipetrain.schedule.kinds import REDUCING
from pipetrain.schedule.op import Lane, Op


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op that ran: `start` and `end` in seconds on a clock that all ranks of the timeline share.

    A RECV starts when it is posted and ends when the tensor has arrived; a SEND ends when its tensor has left. A REDUCE_GRAD starts
    when the gradients of its bucket are ready, and ends with the sum.

    Between the op before and this one the rank's thread ran for `ran_seconds`, waited for a message for `waited_seconds`, and was ready
    but not running for `stalled_seconds`. Where the host runs ahead of its device they are not measured and 0.
    """

    rank: int
    lane: Lane
    op: Op
    start: float
    end: float
    ran_seconds: float = 0.0
    waited_seconds: float = 0.0
    stalled_seconds: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """All events of one step, of every rank of one replica, by rank and start."""

    num_ranks: int
    events: tuple[OpEvent, ...]

    @functools.cached_property
    def start(self) -> float:
        """When the first op that computes started on any rank; without one: the first event."""
        starts = (event.start for event in self.events if event.op.kind.computes)
        return min(starts, default=min((event.start for event in self.events), default=0.0))

    @functools.cached_property
    def last_op_end(self) -> float:
        """When the last op that computes ended on any rank."""
        return max((event.end for event in self.events if event.op.kind.computes), default=0.0)

    @functools.cached_property
    def end(self) -> float:
        """When the last op that computes, or the last REDUCE_GRAD, ended on any rank: the optimizer waits for both."""
        reduced = max((event.end for event in self.events if event.op.kind in REDUCING), default=self.last_op_end)
        return max(reduced, self.last_op_end)

    @property
    def step_seconds(self) -> float:
        return self.end - self.start

    def of_rank(self, rank: int) -> tuple[OpEvent, ...]:
        return tuple(event for event in self.events if event.rank == rank)


def ran_beside(events: Iterable[OpEvent]) -> bool:
    """Whether some of the ops of one rank overlap in time, as R and B may on a GPU with two streams."""
    in_order = sorted(events, key=lambda event: (event.start, event.end))
    return any(second.start < first.end - 1e-9 * abs(first.end) for first, second in itertools.pairwise(in_order))
