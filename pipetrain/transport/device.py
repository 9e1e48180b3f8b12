"""What a device does besides computing: streams, events, and memory that is kept until a stream no longer reads it.

The verbs are torch.cuda's, behind one small class, and a CPU has a twin of it: whoever crosses from stream to stream makes
the same calls on both. On a CPU all that a stream was given has ended when the call returns, so only the clock is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from pipetrain.transport.host_waits import OnWait, waits_seen

Stream = Any  # of the device that made it
Event = Any
# When an event happened, in seconds of `time.perf_counter`. On a GPU it waits for the event: not for the hot path.
Clock = Callable[[Event], float]


class Device(Protocol):
    """The verbs. A stream does what it is given in order; an event is the end of what a stream was given up to then."""

    def stream(self, *, priority: int = 0) -> Stream:
        """A new stream; -1 goes before 0."""

    def current(self) -> Stream:
        """The stream that gets what this thread launches."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it, `stream` gets what this thread launches."""

    def record(self, stream: Stream) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` gets from now on comes after `event`. The host does not wait."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """What `stream` gets from now on comes after all that `other` was given so far."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Give the memory of `tensor`, allocated on another stream, to nobody before `stream` has done what it was given.

        That is counted from when the last owner on the host lets go of the tensor.
        """

    def finish(self, stream: Stream) -> None:
        """The host waits until `stream` has done all that it was given."""

    def clock(self, stream: Stream) -> Clock:
        """Reads events that are recorded from now on; `stream` is idle or gets its next work after this."""

    def watch_waits(self, on_wait: OnWait) -> AbstractContextManager[Any]:
        """Within it `on_wait(file, line)` is called where the host waits for the device, as far as that can be seen."""

    def has_ended(self, event: Event) -> bool:
        """Whether `event` has happened. For any thread; nobody waits."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8, from which and to which the device copies while the host goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give the current stream a copy between the host's memory and the device's; whoever calls holds both until it has ended."""


class CudaDevice:
    """One GPU. ROCm's torch has the same calls under the same names. Not yet run on a machine with a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, priority: int = 0) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        stream.wait_stream(other)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def finish(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()

    def clock(self, stream: torch.cuda.Stream) -> Clock:
        zero, offset = self.record(stream), time.perf_counter()

        def seconds(event: torch.cuda.Event) -> float:
            event.synchronize()
            milliseconds: float = zero.elapsed_time(event)
            return offset + milliseconds / 1e3

        return seconds

    @contextmanager
    def watch_waits(self, on_wait: OnWait) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with waits_seen(on_wait):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def has_ended(self, event: torch.cuda.Event) -> bool:
        with torch.cuda.device(self._device):  # a thread of its own would start CUDA on the first GPU
            return event.query()  # type: ignore[no-any-return, no-untyped-call]

    def host_memory(self, num_bytes: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class CpuDevice:
    """The twin: a stream is nothing, and an event is a time."""

    def stream(self, *, priority: int = 0) -> Stream:  # noqa: ARG002
        return None

    def current(self) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:  # noqa: ARG002
        return _HERE

    def record(self, stream: Stream) -> float:  # noqa: ARG002
        return time.perf_counter()

    def wait(self, stream: Stream, event: float) -> None:
        """`event` has happened."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """All that `other` was given has ended."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Nothing reads a tensor later than its owner."""

    def finish(self, stream: Stream) -> None:
        """All that `stream` was given has ended."""

    def clock(self, stream: Stream) -> Clock:  # noqa: ARG002
        return float

    def watch_waits(self, on_wait: OnWait) -> AbstractContextManager[Any]:  # noqa: ARG002
        return _HERE

    def has_ended(self, event: float) -> bool:  # noqa: ARG002
        return True

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


_HERE = nullcontext()


def device_of(device: torch.device) -> Device:
    """The verbs of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()
