"""What a device does besides computing: streams, events, and memory that is kept until a stream no longer reads it.

The verbs are torch.cuda's, behind one small class, and a CPU has a twin of it: whoever crosses from stream to stream makes
the same calls on both. On a CPU all that a stream was given has ended when the call returns, so only the clock is left.
"""

from __future__ import annotations

import resource
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipetrain.transport.device_clock import AnchoredClock, StepClock

Stream = Any  # of the device that made it
Event = Any


@dataclass(frozen=True)
class DeviceMemory:
    """What a rank has of its device's memory, in bytes. On a CPU: of the process, and only the most that it had."""

    peak_bytes: int | None  # in use by tensors
    peak_reserved_bytes: int | None = None  # taken from the device for them: with what is free, but not given back
    other_bytes: int | None = None  # in use otherwise, by any process: contexts, kernels, communicators


class Device(Protocol):
    """The verbs. A stream does what it is given in order; an event is the end of what a stream was given up to then.

    `runs_ahead`: the host goes on while a stream still works, so that an op has ended for the host when it is launched.
    """

    runs_ahead: bool

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

    def waited(self, what: str) -> None:
        """The host is about to wait for the device, for `what`: for whoever counts."""

    def clock(self) -> StepClock:
        """Reads events that are recorded from now on, in seconds of `time.perf_counter`.

        Reading one waits for it: not for the hot path.
        """

    def has_ended(self, event: Event) -> bool:
        """Whether `event` has happened. For any thread; nobody waits."""

    def memory(self) -> DeviceMemory:
        """What this process has used up to now."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8, from which and to which the device copies while the host goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give the current stream a copy between the host's memory and the device's; whoever calls holds both until it has ended."""


class CudaDevice:
    """One GPU. ROCm's torch has the same calls under the same names. Not yet run on a machine with a GPU."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: AnchoredClock | None = None

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

    def waited(self, what: str) -> None:
        """Nobody counts."""

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

    def has_ended(self, event: torch.cuda.Event) -> bool:
        with torch.cuda.device(self._device):  # a thread of its own would start CUDA on the first GPU
            return bool(event.query())  # type: ignore[no-untyped-call]

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
            total - free - torch.cuda.memory_reserved(self._device),
        )

    def host_memory(self, num_bytes: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class CpuDevice:
    """The twin: a stream is nothing, and an event is a time."""

    runs_ahead = False

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

    def waited(self, what: str) -> None:
        """The host is the device."""

    def clock(self) -> StepClock:
        return StepClock(float, lambda: 0.0)

    def has_ended(self, event: float) -> bool:  # noqa: ARG002
        return True

    def memory(self) -> DeviceMemory:
        return DeviceMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


_HERE = nullcontext()


def device_of(device: torch.device) -> Device:
    """The verbs of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()
