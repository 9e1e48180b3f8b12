"""The clocks of the ranks, compared: so that what each rank measured can be drawn on one axis."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass

from pipetrain.comm.chain import Chain

_WHAT = "the clock"
_TIME = struct.Struct("<d")
_STAMPS = struct.Struct("<dddd")  # when a message passed a rank, up and down, and its clock: offset and error
_NUM_TRIPS = 8


@dataclass(frozen=True)
class Clock:
    """Add `offset_seconds` to a time of this rank to have it on rank 0's clock, wrong by `error_seconds` at most."""

    offset_seconds: float
    error_seconds: float


def align_clocks(chain: Chain, replicas: Chain | None = None) -> Clock:
    """How this rank's clock differs from rank 0's: along the first ranks of the `replicas`, then along the `chain` of each. Collective."""
    of_first = Clock(0.0, 0.0)
    if replicas is not None and chain.rank == 0:
        of_first = _align(replicas, of_first)
    return _align(chain, of_first)


def _align(chain: Chain, of_first: Clock) -> Clock:
    """How this rank's clock differs from the reference, as the first of the chain does by `of_first`: from one
    to the next, by the quickest of some round trips (Cristian
    1989, *Probabilistic clock synchronization*, section 4; four times per trip as in Mills 1991, *Internet time
    synchronization*, section 3).

        rank r - 1   -- passed up -------- passed down --     of this rank's round trip the neighbour has
        rank r     passed up ----------------- passed down    had the message for the time in between
    """
    clock = of_first
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
