"""The clocks of the ranks and of their devices, compared: so that what each rank measured can be drawn on one axis.

An event of a device is launched long before it happens: a host that runs ahead of its device by seconds would put it seconds too early.
So its clock and the host's are compared where an event is known to have happened: one on a stream that has nothing else to do.

    host     before = now ── record ── has it ended? ── has it happened? ── yes: after = now
    device                       ▲ some time in between
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipetrain.comm.chain import Chain

_WHAT = "the clock"
_TIME = struct.Struct("<d")
_STAMPS = struct.Struct("<dddd")  # when a message passed a rank, up and down, and its clock: offset and error
_NUM_TRIPS = 8

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
class Clock:
    """Add `offset_seconds` to a time of this rank to have it on rank 0's clock, wrong by `error_seconds` at most."""

    offset_seconds: float
    error_seconds: float


def align_clocks(chain: Chain, replicas: Chain | None = None) -> Clock:
    """How this rank's clock differs from rank 0's: along the first ranks of the `replicas`, then along the `chain` of each. Collective.

    From one rank to the next, by the quickest of some round trips (Cristian
    1989, *Probabilistic clock synchronization*, section 4; four times per trip as in Mills 1991, *Internet time
    synchronization*, section 3).

        rank r - 1   -- passed up -------- passed down --     of this rank's round trip the neighbour has
        rank r     passed up ----------------- passed down    had the message for the time in between
    """
    clock = align_clocks(replicas) if replicas is not None and chain.rank == 0 else Clock(0.0, 0.0)
    trips: list[tuple[float, float]] = []  # how wrong the neighbour's offset may be, and the offset
    for _ in range(_NUM_TRIPS if chain.num_ranks > 1 else 0):
        (passed_up,) = _TIME.unpack(chain.up(lambda _: _TIME.pack(time.perf_counter()), _WHAT))

        def stamp(received: bytes | None, passed_up: float = passed_up) -> bytes:
            nonlocal clock
            passed_down = time.perf_counter()
            if received is not None:
                before_up, before_down, offset, error = _STAMPS.unpack(received)
                away, there = passed_down - passed_up, before_down - before_up
                trips.append(((away - there) / 2, (before_up + before_down - passed_up - passed_down) / 2))
                doubt, ahead = min(trips)
                # Ranks of one machine share their clock: a difference below the error of the round trip counts as none.
                clock = Clock(offset + (ahead if abs(ahead) > doubt else 0.0), error + doubt)
            return _STAMPS.pack(passed_up, passed_down, clock.offset_seconds, clock.error_seconds)

        chain.down(stamp, _WHAT)
    return clock


@dataclass(frozen=True)
class _Anchor:
    """An event, and when it happened on the host's clock, give or take `error_seconds`."""

    event: Event
    seconds: float
    error_seconds: float


class StepClock(NamedTuple):
    """Reads the events of one step: `read(event)` is in seconds of the host's clock. `error_seconds()` is how wrong what was read so
    far may be, at most."""

    read: Callable[[Event], float]
    error_seconds: Callable[[], float]


@dataclass
class AnchoredClock:
    """The clock of a device, compared with the host's now and then.

    `record` records an event on a stream that is idle, `has_ended` asks without waiting, `finish` waits for an event.
    """

    record: Callable[[], Event]
    has_ended: Callable[[Event], bool]
    finish: Callable[[Event], None]
    elapsed: ElapsedSeconds
    now: Callable[[], float] = time.perf_counter
    _anchor: _Anchor | None = field(default=None, init=False)

    def of_step(self) -> StepClock:
        """For events that are recorded from now on."""
        anchor = self._refreshed()
        farthest = 0.0

        def read(event: Event) -> float:
            nonlocal farthest
            self.finish(event)
            since = self.elapsed(anchor.event, event)
            farthest = max(farthest, since)
            return anchor.seconds + since

        return StepClock(read, lambda: anchor.error_seconds + _DRIFT * farthest)

    def _refreshed(self) -> _Anchor:
        old = self._anchor
        if old is not None and self.now() - old.seconds < _REFRESH_SECONDS:
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
        before = self.now()
        event = self.record()
        while not self.has_ended(event):
            if patience is not None and self.now() - before > patience:
                return None
        after = self.now()
        return _Anchor(event, (before + after) / 2, (after - before) / 2)
