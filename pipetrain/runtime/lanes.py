"""Where the lanes of a rank run, and when each op ran: threads of one clock on a CPU, streams and events on a GPU.

Every crossing between lanes has the same three moments, on both:

    with lanes.on(lane, waits):     [1] wait   for the ops that must have ended (a stream waits for their events)
        with lanes.timed(lane, op): [2] run    the op
                                    [3] record that it has ended (an event on the stream)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Lane, Op

# The events of a step, by start. On a GPU a call waits for the step to end on the device: not for the hot path.
Recording = Callable[[], tuple[OpEvent, ...]]


class Lanes(Protocol):
    """Binds the lanes of a rank to what its device has."""

    def start_step(self) -> None: ...
    def end_step(self) -> None: ...
    def on(self, lane: Lane, waits: Sequence[Op]) -> AbstractContextManager[None]: ...
    def timed(self, lane: Lane, op: Op) -> AbstractContextManager[None]: ...
    def record(self, lane: Lane, op: Op, start: float, end: float) -> None: ...
    def recording(self) -> Recording: ...


class CpuLanes:
    """Lanes on a CPU: what was waited for has ended when the executor starts an op, so only the clock is left."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rank = rank
        self._clock = clock
        self._events: list[OpEvent] = []

    def start_step(self) -> None:
        self._events = []

    def end_step(self) -> None:
        """Nothing to join: every op has ended."""

    @contextmanager
    def on(self, lane: Lane, waits: Sequence[Op]) -> Iterator[None]:  # noqa: ARG002
        yield

    @contextmanager
    def timed(self, lane: Lane, op: Op) -> Iterator[None]:
        start = self._clock()
        yield
        self._events.append(OpEvent(self._rank, lane, op, start, self._clock()))

    def record(self, lane: Lane, op: Op, start: float, end: float) -> None:
        self._events.append(OpEvent(self._rank, lane, op, start, end))

    def recording(self) -> Recording:
        events = self._events
        return lambda: _by_start(events)


class CudaLanes:
    """Lanes as CUDA streams: compute at high priority, recompute at low, so that R yields to F and B.

    Not yet run on a machine with a GPU.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        # One hardware queue would make the streams wait for each other (Megatron-LM sets 1 for another reason).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._rank = rank
        self._device = device
        low, high = 0, -1
        self._streams = {
            Lane.COMPUTE: torch.cuda.Stream(device, priority=high),  # type: ignore[no-untyped-call]
            Lane.RECOMPUTE: torch.cuda.Stream(device, priority=low),  # type: ignore[no-untyped-call]
        }
        self._ended: dict[Op, torch.cuda.Event] = {}
        self._spans: list[tuple[Lane, Op, torch.cuda.Event, torch.cuda.Event]] = []
        self._host: list[OpEvent] = []
        self._zero: tuple[torch.cuda.Event, float] | None = None

    def start_step(self) -> None:
        self._ended.clear()
        self._spans, self._host = [], []
        caller = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(caller)  # [1] the optimizer wrote the parameters on the caller's stream
        zero = _timed_event()
        zero.record(self._streams[Lane.COMPUTE])
        self._zero = (zero, time.perf_counter())

    def end_step(self) -> None:
        caller = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            caller.wait_stream(stream)  # [3] gradients are complete for whatever the caller does next

    @contextmanager
    def on(self, lane: Lane, waits: Sequence[Op]) -> Iterator[None]:
        stream = self._streams[lane]
        for op in waits:
            if op in self._ended:
                stream.wait_event(self._ended[op])  # [1]
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def timed(self, lane: Lane, op: Op) -> Iterator[None]:
        stream = self._streams[lane]
        start, end = _timed_event(), _timed_event()
        start.record(stream)
        yield  # [2]
        end.record(stream)  # [3]
        self._ended[op] = end
        self._spans.append((lane, op, start, end))

    def record(self, lane: Lane, op: Op, start: float, end: float) -> None:
        self._host.append(OpEvent(self._rank, lane, op, start, end))

    def recording(self) -> Recording:
        assert self._zero is not None
        (zero, offset), spans, host = self._zero, self._spans, self._host

        def resolve() -> tuple[OpEvent, ...]:
            found = list(host)
            for lane, op, start, end in spans:
                end.synchronize()
                first, last = zero.elapsed_time(start) / 1e3, zero.elapsed_time(end) / 1e3
                found.append(OpEvent(self._rank, lane, op, offset + first, offset + last))
            return _by_start(found)

        return resolve


def _by_start(events: Iterable[OpEvent]) -> tuple[OpEvent, ...]:
    return tuple(sorted(events, key=lambda event: event.start))


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_lanes(rank: int, device: torch.device) -> Lanes:
    return CudaLanes(rank, device) if device.type == "cuda" else CpuLanes(rank)
