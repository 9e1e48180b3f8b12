"""What a device does besides computing: streams, events, and memory that streams hand to each other.

The verbs are torch.cuda's, behind one small class, and a CPU has a twin of it: whoever crosses from stream to stream makes
the same calls on both. On a CPU all that a stream was given has ended when the call returns, so only the clock is left.
Who must know the difference asks `runs_ahead`, and not what the device is called.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pipetrain.transport.device_clock import AnchoredClock, StepClock
from pipetrain.transport.host_waits import OnWait, waits_seen

Stream = Any  # of the device that made it
Event = Any

HIGH, LOW = -1, 0  # priorities of streams: where both have work, the first goes before


@dataclass(frozen=True)
class DeviceMemory:
    """What a rank has of its device's memory, in bytes. On a CPU: of the process, and only the most that it had."""

    peak_bytes: int | None  # in use by tensors
    peak_reserved_bytes: int | None = None  # taken from the device for them: with what is free, but not given back
    other_bytes: int | None = None  # in use otherwise, by any process: contexts, kernels, communicators


class Device(Protocol):
    """The verbs. A stream does what it is given in order; an event is the end of what a stream was given up to then.

    `runs_ahead` says whether the host does: what a call gives to a stream ends later than the call.
    """

    runs_ahead: bool

    def stream(self, *, priority: int = LOW) -> Stream:
        """A stream that nobody else has.

        Raises:
            RuntimeError: there is none left.
        """

    def current(self) -> Stream:
        """The stream that gets what this thread launches."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it, `stream` gets what this thread launches."""

    def record(self, stream: Stream, again: Event | None = None) -> Event:
        """The end of what `stream` was given; in the event `again`, for which nobody asks any more, where there is one."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` gets from now on comes after `event`. The host does not wait."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """What `stream` gets from now on comes after all that `other` was given so far."""

    def lent(self, tensor: Tensor) -> Tensor:
        """The memory of `tensor` for a library that would have it kept until its own streams have passed: whoever lends it
        holds it long enough, and the allocator is not told."""

    def finish(self, stream: Stream) -> None:
        """The host waits until `stream` has done all that it was given."""

    def has_ended(self, event: Event) -> bool:
        """Whether `event` has happened. For any thread; nobody waits."""

    def waited(self, what: str) -> None:
        """The host is about to wait for the device, for `what`: for whoever counts."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8, from which and to which the device copies while the host goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give the current stream a copy between the host's memory and the device's; whoever calls holds both until it has ended."""

    def clock(self) -> StepClock:
        """Reads events that are recorded from now on, in seconds of `time.perf_counter`.

        Reading one waits for it: not for the hot path.
        """

    def memory(self) -> DeviceMemory:
        """What this process has used up to now."""

    def watch_waits(self, on_wait: OnWait) -> AbstractContextManager[Any]:
        """Within it `on_wait(file, line)` is called where the host waits for the device, as far as that can be seen."""


class CudaDevice:
    """One GPU. ROCm's torch has the same calls under the same names. Not yet run on a machine with a GPU."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch hands out 32 streams of a priority in turn, and then the first again: of these somebody holds.
        self._taken: MutableMapping[int, torch.cuda.Stream] = WeakValueDictionary()
        self._clock: AnchoredClock | None = None

    def stream(self, *, priority: int = LOW) -> torch.cuda.Stream:
        for _ in range(_STREAMS_OF_A_PRIORITY):
            stream = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in self._taken:
                self._taken[stream.cuda_stream] = stream
                return stream
        raise RuntimeError(
            f"{self._device} has {_STREAMS_OF_A_PRIORITY} streams of a priority, and this rank needs more: two for each edge "
            "of its stages. Use fewer stages per rank, or close the pipelines that are not used any more"
        )

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True) if again is None else again  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        stream.wait_stream(other)

    def lent(self, tensor: Tensor) -> Tensor:
        # ProcessGroupNCCL calls record_stream on what it sends and receives, and a block under it comes back only when the
        # device gets there. The caching allocator passes over memory that does not carry its own deleter.
        return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))

    def finish(self, stream: torch.cuda.Stream) -> None:
        self.waited("a stream")
        stream.synchronize()

    def has_ended(self, event: torch.cuda.Event) -> bool:
        with torch.cuda.device(self._device):  # a thread of its own would start CUDA on the first GPU
            return event.query()  # type: ignore[no-any-return, no-untyped-call]

    def waited(self, what: str) -> None:
        """Nobody counts."""

    def host_memory(self, num_bytes: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def clock(self) -> StepClock:
        if self._clock is None:
            idle = self.stream()
            self._clock = AnchoredClock(
                lambda: self.record(idle),
                self.has_ended,
                lambda event: event.synchronize(),
                lambda one, other: one.elapsed_time(other) / 1e3,
            )
        return self._clock.of_step()

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
            total - free - torch.cuda.memory_reserved(self._device),
        )

    @contextmanager
    def watch_waits(self, on_wait: OnWait) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with waits_seen(on_wait):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


_STREAMS_OF_A_PRIORITY = 32


class CpuDevice:
    """The twin: a stream is nothing, and an event is a time."""

    runs_ahead = False

    def stream(self, *, priority: int = LOW) -> Stream:  # noqa: ARG002
        return None

    def current(self) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:  # noqa: ARG002
        return _HERE

    def record(self, stream: Stream, again: Event | None = None) -> float:  # noqa: ARG002
        return time.perf_counter()

    def wait(self, stream: Stream, event: float) -> None:
        """`event` has happened."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """All that `other` was given has ended."""

    def lent(self, tensor: Tensor) -> Tensor:
        return tensor

    def finish(self, stream: Stream) -> None:
        """All that `stream` was given has ended."""

    def has_ended(self, event: float) -> bool:  # noqa: ARG002
        return True

    def waited(self, what: str) -> None:
        """The host is the device."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def clock(self) -> StepClock:
        return StepClock(float, lambda: 0.0)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def watch_waits(self, on_wait: OnWait) -> AbstractContextManager[Any]:  # noqa: ARG002
        return _HERE


_HERE = nullcontext()


@lru_cache(maxsize=64)
def _cuda(device: torch.device) -> CudaDevice:
    """One for each GPU of the process, which knows all streams that were taken."""
    return CudaDevice(device)


def device_of(device: torch.device) -> Device:
    """The verbs of a torch device."""
    return _cuda(device) if device.type == "cuda" else CpuDevice()
