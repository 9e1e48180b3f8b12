"""Looks after a rank whose computing thread cannot: it may sit in a launch, or in a layer that waits for the device.

A device waits without a time-out for a message of a rank that is gone, and so does whoever waits for the device. What ends that
is to break the connections, from another thread.
"""

from __future__ import annotations

import threading
import time

from pipetrain.group.failure import Monitor

_LOOK_SECONDS = 1.0


class Watchdog:
    """A thread that fails the pipeline on this rank when another rank has failed, or when this rank has been in one op
    (`monitor.doing`) for longer than `monitor.timeout_seconds`. What the computing thread waits for in `monitor` it sees to itself."""

    def __init__(self, monitor: Monitor, look_seconds: float = _LOOK_SECONDS) -> None:
        self._monitor = monitor
        self._look_seconds = look_seconds
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen, since = None, time.monotonic()
        while not self._is_closed.wait(self._look_seconds):
            self._monitor.look()
            doing = self._monitor.doing
            if doing is not seen or doing is None or self._monitor.is_waiting:
                seen, since = doing, time.monotonic()
            elif time.monotonic() - since > self._monitor.timeout_seconds:
                self._monitor.fail(
                    f"{self._monitor.name} is in {doing} and came no further for {self._monitor.timeout_seconds:g} s "
                    "(timeout_seconds): its host waits for its device, which waits for a message, or a layer hangs"
                )
            if self._monitor.failure is not None:
                return

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._monitor.timeout_seconds)
