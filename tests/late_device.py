"""A device whose copies end late: real streams, each a thread that does what it is given in order, on the CPU's memory.

Layers compute at once, on the thread that calls them, after their stream has done what it was given before. Copies between the
host and the device are given to a stream and end LATE_SECONDS later: whoever does not wait for one reads what was there before.
Host memory begins as NaN.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipetrain.comm.clocks import StepClock
from pipetrain.comm.device import LOW, CpuDevice

LATE_SECONDS = 0.005


class _Event:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._happened = threading.Event()

    def happen(self) -> None:
        self.seconds = time.perf_counter()
        self._happened.set()

    def wait(self) -> None:
        self._happened.wait()

    @property
    def has_happened(self) -> bool:
        return self._happened.is_set()


class _Stream:
    def __init__(self) -> None:
        self.give: Callable[[Callable[[], Any]], None]
        jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.give = jobs.put
        threading.Thread(target=self._run, args=(jobs,), daemon=True).start()

    def _run(self, jobs: queue.SimpleQueue[Callable[[], Any]]) -> None:
        while True:
            jobs.get()()


class LateDevice(CpuDevice):
    runs_ahead = True

    def __init__(self) -> None:
        self._current = _Stream()

    def stream(self, *, priority: int = LOW) -> _Stream:  # noqa: ARG002
        return _Stream()

    def current(self) -> _Stream:
        return self._current

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        self.finish(stream)
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: _Stream, again: Any = None) -> Any:  # noqa: ARG002
        event = _Event()
        stream.give(event.happen)
        return event

    def wait(self, stream: _Stream, event: Any) -> None:
        stream.give(event.wait)

    def follow(self, stream: _Stream, other: _Stream) -> None:
        self.wait(stream, self.record(other))

    def finish(self, stream: _Stream) -> None:
        self.record(stream).wait()

    def clock(self) -> StepClock:
        def seconds(event: _Event) -> float:
            event.wait()
            return event.seconds

        return StepClock(seconds, lambda: 0.0)

    def has_ended(self, event: Any) -> bool:
        return bool(event.has_happened)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        def late() -> None:
            time.sleep(LATE_SECONDS)
            target.copy_(source)

        self._current.give(late)


class LateFlag:
    """`spinning.Flag` on such a device: `here()` is that of the rank that asks, `stuck` tells of waits that were given up."""

    def __init__(self, here: Callable[[], LateDevice], stuck: list[int], patience_seconds: float) -> None:
        self._here = here
        self._stuck = stuck
        self._patience_seconds = patience_seconds
        self._value = 0
        self._raised = threading.Condition()

    def raise_to(self, value: int) -> None:
        def raising() -> None:
            with self._raised:
                self._value = value
                self._raised.notify_all()

        self._here().current().give(raising)

    def wait_for(self, value: int) -> None:
        def waiting() -> None:
            with self._raised:
                patience = 0.0 if self._stuck else self._patience_seconds
                if not self._raised.wait_for(lambda: self._value >= value, patience):
                    self._stuck.append(value)

        self._here().current().give(waiting)
