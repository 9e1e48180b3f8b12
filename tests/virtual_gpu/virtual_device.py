"""The verbs of `transport.device.Device` on a GPU that is not there: each is written down, and nothing waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipetrain.schedule.op import Op
from virtual_gpu.kernels import Blocks, KernelMode
from virtual_gpu.recorded import CallMark, EventRecord, EventWait, HostMessage, HostWait, Keep, Launch, RankRecording

STREAMS_PER_PRIORITY = 32  # torch hands out so many, in turn


@dataclass(frozen=True)
class VirtualStream:
    number: int
    priority: int


@dataclass(frozen=True)
class VirtualEvent:
    number: int
    host_seconds: float


class VirtualDevice:
    """One rank's GPU. What its threads compute is recorded inside `kernels`."""

    runs_ahead = True

    def __init__(self, rank: int) -> None:
        self.recording = RankRecording(rank)
        self.blocks = Blocks(self.recording)
        self._pools: dict[int, list[VirtualStream]] = {}
        self._handed_out: dict[int, int] = {}
        self._caller = self._new("caller", 0)
        self._here = threading.local()
        self._num_events = 0
        self.num_calls = 0
        self.expected: dict[Op, tuple[Any, ...]] = {}  # receives for whose form the host waits, and who tells it
        self.launches: Op | None = None  # what the host is at

    # The verbs ----------------------------------------------------------------------------------------------------

    def stream(self, *, priority: int = 0) -> VirtualStream:
        pool = self._pools.setdefault(priority, [])
        number = self._handed_out.get(priority, 0)
        self._handed_out[priority] = number + 1
        if len(pool) < STREAMS_PER_PRIORITY:
            pool.append(self._new("", priority))
        return pool[number % STREAMS_PER_PRIORITY]

    def current(self) -> VirtualStream:
        stream: VirtualStream = getattr(self._here, "stream", self._caller)
        return stream

    @contextmanager
    def on(self, stream: VirtualStream) -> Iterator[None]:
        before, self._here.stream = self.current(), stream
        try:
            with self.kernels():
                yield
        finally:
            self._here.stream = before

    def record(self, stream: VirtualStream) -> VirtualEvent:
        event = VirtualEvent(self._num_events, time.perf_counter())
        self._num_events += 1
        self.recording.entries.append(EventRecord(stream.number, event.number))
        return event

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        self.recording.entries.append(EventWait(stream.number, event.number))

    def follow(self, stream: VirtualStream, other: VirtualStream) -> None:
        self.wait(stream, self.record(other))

    def keep(self, tensor: Tensor, stream: VirtualStream) -> None:
        self.recording.entries.append(Keep(self.block(tensor), stream.number))

    def finish(self, stream: VirtualStream) -> None:
        self.recording.entries.append(HostWait("finish", stream=stream.number))

    def clock(self, stream: VirtualStream) -> Callable[[Any], float]:
        self.record(stream)

        def seconds(event: VirtualEvent) -> float:
            self.recording.entries.append(HostWait("clock", event=event.number))
            return event.host_seconds

        return seconds

    # What else is written down ------------------------------------------------------------------------------------

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """What this thread computes is recorded, on its current stream."""
        if getattr(self._here, "recorded", False):
            yield
            return
        self._here.recorded = True
        try:
            with KernelMode(self.recording, self.blocks, self._stream_of_kernels):
                yield
        finally:
            self._here.recorded = False

    def _stream_of_kernels(self) -> int | None:
        return None if getattr(self._here, "unrecorded", False) else self.current().number

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What this thread computes is none of the device's work."""
        self._here.unrecorded = True
        try:
            yield
        finally:
            self._here.unrecorded = False

    def block(self, tensor: Tensor) -> int:
        return self.blocks.of(tensor, self.current().number)

    @contextmanager
    def launching(self, op: Op) -> Iterator[None]:
        """The host launches `op`."""
        before, self.launches = self.launches, op
        self.recording.entries.append(Launch(op, begins=op != before))
        try:
            yield
        finally:
            self.launches = before
            self.recording.entries.append(Launch(before, begins=False))

    @contextmanager
    def call(self, call: str) -> Iterator[None]:
        """A call of the pipeline; calls are counted from 1."""
        self.num_calls += 1
        number = self.num_calls
        self.recording.entries.append(CallMark(call, number, begins=True))
        yield
        self.recording.entries.append(CallMark(call, number, begins=False))

    def tell(self, key: tuple[Any, ...]) -> None:
        """The host says something to another one; it does not wait."""
        self.recording.entries.append(HostMessage(key, told=True))

    def hear(self, key: tuple[Any, ...]) -> None:
        """The host has waited for what another one says."""
        self.recording.entries.append(HostMessage(key, told=False))

    def own_stream(self, name: str) -> VirtualStream:
        """A stream of a library's own, from the same pool."""
        stream = self.stream()
        self.name(stream, name)
        return stream

    def name(self, stream: VirtualStream, name: str) -> None:
        names = self.recording.streams
        if not names[stream.number]:
            names[stream.number] = name
        elif name not in names[stream.number].split(" and "):
            names[stream.number] += f" and {name}"

    def _new(self, name: str, priority: int) -> VirtualStream:
        self.recording.streams.append(name)
        return VirtualStream(len(self.recording.streams) - 1, priority)
