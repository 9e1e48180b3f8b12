"""The verbs of `transport.device.Device` on a GPU that is not there: each is written down, and nothing waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipetrain.comm.clocks import StepClock
from pipetrain.comm.device import DeviceMemory
from pipetrain.schedule.op import Op
from virtual_gpu.kernels import Blocks, KernelMode
from virtual_gpu.recorded import (
    CallMark,
    EventRecord,
    EventWait,
    HostJoin,
    HostMessage,
    HostWait,
    Keep,
    Launch,
    RankRecording,
)

STREAMS_PER_PRIORITY = 32  # torch hands out so many, in turn


@dataclass(frozen=True)
class VirtualStream:
    number: int
    priority: int


@dataclass
class VirtualEvent:
    number: int
    host_seconds: float = 0.0  # of the launch: what it would be on the device is not modelled


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
        self._thread = threading.get_ident()  # that launches ops
        self._num_events = 0
        self.num_calls = 0
        self._reason = "the device"  # of the next wait of the host
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

    def record(self, stream: VirtualStream, again: VirtualEvent | None = None) -> VirtualEvent:
        event = VirtualEvent(self._num_events) if again is None else again
        self._num_events += again is None
        event.host_seconds = time.perf_counter()
        self.recording.entries.append(EventRecord(stream.number, event.number))
        return event

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        self.recording.entries.append(EventWait(stream.number, event.number))

    def follow(self, stream: VirtualStream, other: VirtualStream) -> None:
        self.wait(stream, self.record(other))

    def keep(self, tensor: Tensor, stream: VirtualStream) -> None:
        self.recording.entries.append(Keep(self.block(tensor), stream.number))

    def lent(self, tensor: Tensor) -> Tensor:
        with self.unrecorded():
            alias = torch.from_dlpack(tensor.detach())
        self.blocks.lend(alias, self.block(tensor))
        return alias

    def finish(self, stream: VirtualStream) -> None:
        self.waited("finish")
        self._host_waits(stream=stream.number)

    def has_ended(self, event: VirtualEvent) -> bool:
        """Yes: the host of a rank asks as long as it has to, so that it has waited. Other threads may ask in vain."""
        if self._is_recorded():
            self._host_waits(event=event.number)
        return True

    def waited(self, what: str) -> None:
        self._reason = what

    def _host_waits(self, *, event: int | None = None, stream: int | None = None) -> None:
        helper = threading.get_ident() != self._thread
        self.recording.entries.append(HostWait(self._reason, event, stream, helper))
        self._reason = "the device"

    def joins_helpers(self) -> None:
        """The host has waited for its other threads."""
        self.recording.entries.append(HostJoin())

    def host_memory(self, num_bytes: int) -> Tensor:
        with self.unrecorded():
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.blocks.pin(memory)
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def watch_waits(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None)

    def clock(self) -> StepClock:
        """When events were launched."""

        def read(event: VirtualEvent) -> float:
            self.has_ended(event)
            return event.host_seconds

        return StepClock(read, lambda: 0.0)

    # What else is written down ------------------------------------------------------------------------------------

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """What this thread computes is recorded, on its current stream."""
        if self._is_recorded():
            yield
            return
        self._here.recorded = True
        try:
            with KernelMode(self.recording, self.blocks, self._stream_of_kernels):
                yield
        finally:
            self._here.recorded = False

    def is_launched_here(self) -> None:
        """The thread that calls this is the one that launches ops."""
        self._thread = threading.get_ident()

    def _is_recorded(self) -> bool:
        return getattr(self._here, "recorded", False)

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
