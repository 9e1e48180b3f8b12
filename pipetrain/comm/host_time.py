"""Where the time of the thread that computes goes between two ops: it runs, it waits for a message, or it does neither.

op ── runs ── waits: no message is there ── neither ── runs ── next op
                                            │ ready to run, and not run: the machine runs others, or another thread has Python's lock
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Lap(NamedTuple):
    """Seconds of the thread between two ops, which add up to all that passed."""

    ran: float
    waited: float
    stalled: float


class HostTime:
    """The clocks of the thread that calls."""

    def __init__(self) -> None:
        self._at = self._ran = self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it the thread waits for a message."""
        begun, ran = time.perf_counter(), time.thread_time()
        yield
        self._waited += time.perf_counter() - begun - (time.thread_time() - ran)

    def lap(self, now: float) -> Lap:
        """What passed since the last call; `now` is by `time.perf_counter`."""
        ran_until = time.thread_time()
        ran, passed, waited = ran_until - self._ran, now - self._at, self._waited
        self._at, self._ran, self._waited = now, ran_until, 0.0
        return Lap(ran, waited, max(passed - ran - waited, 0.0))
