"""When the events of a device happened, on the host's clock, and how wrong that may be.

An event is launched long before it happens: a host that runs ahead of its device by seconds would put it seconds too early.
So the two clocks are compared where an event is known to have happened: one on a stream that has nothing else to do.

    host     before = now ── record ── has it ended? ── has it happened? ── yes: after = now
    device                       ▲ some time in between
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Event = Any
ElapsedSeconds = Callable[[Event, Event], float]  # from an event to a later one, on the device's clock

# The host asks this often at an anchor and takes the narrowest answer: a host that is busy looks away in between.
_TRIES = 5
# An idle stream answers within microseconds. One that shares a queue of the hardware with a busy one may not.
_PATIENCE_SECONDS = 1e-3
_REFRESH_SECONDS = 10.0
# How fast the clock of a device may run away from the host's: quartz drifts a hundredth of this.
_DRIFT = 1e-4


@dataclass(frozen=True)
class _Anchor:
    """An event, and when it happened on the host's clock, give or take `error_seconds`."""

    event: Event
    seconds: float
    error_seconds: float


class StepClock:
    """Reads the events of one step: `clock(event)` is in seconds of the host's clock. `error_seconds()` is how wrong what was read so
    far may be, at most."""

    def __init__(self, read: Callable[[Event], float], error_seconds: Callable[[], float]) -> None:
        self._read = read
        self.error_seconds = error_seconds

    def __call__(self, event: Event) -> float:
        return self._read(event)


class AnchoredClock:
    """The clock of a device, compared with the host's now and then.

    `record` records an event on a stream that is idle, `has_ended` asks without waiting, `finish` waits for an event.
    """

    def __init__(
        self,
        record: Callable[[], Event],
        has_ended: Callable[[Event], bool],
        finish: Callable[[Event], None],
        elapsed: ElapsedSeconds,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._record = record
        self._has_ended = has_ended
        self._finish = finish
        self._elapsed = elapsed
        self._now = now
        self._anchor: _Anchor | None = None

    def of_step(self) -> StepClock:
        """For events that are recorded from now on."""
        anchor = self._refreshed()
        farthest = 0.0

        def read(event: Event) -> float:
            nonlocal farthest
            self._finish(event)
            since = self._elapsed(anchor.event, event)
            farthest = max(farthest, since)
            return anchor.seconds + since

        return StepClock(read, lambda: anchor.error_seconds + _DRIFT * farthest)

    def _refreshed(self) -> _Anchor:
        old = self._anchor
        if old is not None and self._now() - old.seconds < _REFRESH_SECONDS:
            return old
        found = [anchor for _ in range(_TRIES) if (anchor := self._compare(_PATIENCE_SECONDS)) is not None]
        if found:
            self._anchor = min(found, key=lambda anchor: anchor.error_seconds)
        elif old is None:
            self._anchor = self._compare(None)
        assert self._anchor is not None
        return self._anchor

    def _compare(self, patience: float | None) -> _Anchor | None:
        """One comparison; None: the event did not happen within `patience` seconds (None: wait for it)."""
        before = self._now()
        event = self._record()
        while not self._has_ended(event):
            if patience is not None and self._now() - before > patience:
                return None
        after = self._now()
        return _Anchor(event, (before + after) / 2, (after - before) / 2)
