"""What a device does besides computing: streams, events, and memory that streams hand to each other.

The verbs are torch.cuda's, behind one small class, and a CPU has a twin of it: whoever crosses from stream to stream makes
the same calls on both. On a CPU all that a stream was given has ended when the call returns, so only the clock is left.
Who must know the difference asks `runs_ahead`, and not what the device is called.

Pinned memory is near its GPU: on machines with several NUMA nodes a copy to another node's memory was three times as slow
(120 against 350 GB/s: pytorch/torchtitan, issue 3489). Linux gives a page to the node of the core that first touches it. So pinned
memory is taken by a thread that may run on the cores of the GPU's node alone, as long as that takes.
"""

from __future__ import annotations

import os
import resource
import socket
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pipetrain.comm.clocks import AnchoredClock, StepClock
from pipetrain.comm.failure import Monitor

Stream = Any  # of the device that made it
Event = Any
OnWait = Callable[[str, int], None]

HIGH, LOW = -1, 0  # priorities of streams: where both have work, the first goes before
_STREAMS_OF_A_PRIORITY = 32
# How torch begins to say that the host waits, in its mode of debugging synchronisation (torch.cuda.set_sync_debug_mode).
_WAITS = "called a synchronizing"
_HERE = nullcontext()
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues of a process, read when CUDA starts; 8 where it is not set
_NUM_QUEUES = 32  # the most that there are

Fetch = Callable[[Tensor, str], Tensor]  # a tensor of the device, and what it is; gives it on the host


@dataclass(frozen=True)
class DeviceMemory:
    """What a rank has of its device's memory, in bytes. On a CPU: of the process, and only the most that it had."""

    peak_bytes: int | None  # in use by tensors
    peak_reserved_bytes: int | None = None  # taken from the device for them: with what is free, but not given back
    other_bytes: int | None = None  # in use otherwise, by any process: contexts, kernels, communicators
    limit_bytes: int | None = None  # all that the device has


class CpuDevice:
    """The verbs, and what they are on a CPU, where a stream is nothing and an event is a time. A stream does what it is given in order; an
    event is the end of what a stream was given up to then.

    `runs_ahead` says whether the host does: what a call gives to a stream ends later than the call.
    """

    runs_ahead = False

    def stream(self, *, priority: int = LOW) -> Stream:  # noqa: ARG002
        """A stream that nobody else has.

        Raises RuntimeError: there is none left.
        """
        return None

    def current(self) -> Stream:
        """The stream that gets what this thread launches."""
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Within it, `stream` gets what this thread launches."""
        return _HERE

    def record(self, stream: Stream, again: Event | None = None) -> Event:  # noqa: ARG002
        """The end of what `stream` was given, as an event; `again` is an old one to use again."""
        return time.perf_counter()

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` gets from now on comes after `event`. The host does not wait."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """What `stream` gets from now on comes after all that `other` was given so far."""

    def lent(self, tensor: Tensor) -> Tensor:
        """The memory of `tensor` for a library that would call `record_stream` on it: whoever lends it holds it long enough, and the
        allocator is not told."""
        return tensor

    def finish(self, stream: Stream) -> None:
        """The host waits until `stream` has done all that it was given."""

    def has_ended(self, event: Event) -> bool:  # noqa: ARG002
        """Whether `event` has happened. For any thread; nobody waits."""
        return True

    def waited(self, what: str) -> None:
        """The host is about to wait for the device, for `what`: for whoever counts."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory of the host, uint8, from which and to which the device copies while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give the current stream a copy between the host's memory and the device's; whoever calls holds both until it has ended."""
        target.copy_(source)

    def clock(self) -> StepClock:
        """Reads events that are recorded from now on, in seconds of `time.perf_counter`. Reading one waits for it: not for the hot path."""
        return StepClock(float, lambda: 0.0)

    def memory(self) -> DeviceMemory:
        """What this process has used up to now."""
        return DeviceMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def watch_waits(self, on_wait: OnWait) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Within it `on_wait(file, line)` is called where the host waits for the device, as far as that can be seen."""
        return _HERE


Device = CpuDevice  # or one that has the same verbs


def cores_of_node(pci_address: str, system: Path = Path("/sys")) -> set[int]:
    """The cores of the NUMA node to which the device at `pci_address` (as in `0000:1b:00.0`) is attached; all where the machine has no nodes,
    none where it does not tell."""
    found = set[int]()
    with suppress(OSError, ValueError):  # a list such as `0-3,8-11`
        for part in (system / "bus/pci/devices" / pci_address / "local_cpulist").read_text().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Within it this thread runs on those of `cores` on which it may run; on all of its own if there are none."""
    own = os.sched_getaffinity(0)
    if not cores & own or cores >= own:
        yield
        return
    os.sched_setaffinity(0, cores & own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class CudaDevice(CpuDevice):
    """One GPU. ROCm's torch has the same calls under the same names. Not yet run on a machine with a GPU."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch hands out 32 streams of a priority in turn, then the first again: these are held by somebody.
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

    def host_memory(self, num_bytes: int) -> Tensor:
        gpu: Any = torch.cuda.get_device_properties(self._device)
        near = cores_of_node(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
        with torch.cuda.device(self._device), on_cores(near):
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
            total,
        )

    @contextmanager
    def watch_waits(self, on_wait: OnWait) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with _waits_seen(on_wait):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _waits_seen(on_wait: OnWait) -> Iterator[None]:
    """Within it torch's warning of a wait becomes a call of `on_wait(file, line)`, on the stack of the code that waits.

    Other warnings are shown as before. Python's warning filters belong to the process, so only one thread at a time may do this.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WAITS)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not see all of them
        show = warnings.showwarning

        def look(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if str(message).startswith(_WAITS):
                on_wait(filename, lineno)
            else:
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = look  # type: ignore[assignment]
        yield


@lru_cache(maxsize=64)  # one for each GPU of the process, which knows all streams that were taken
def device_of(device: torch.device) -> CpuDevice:
    """The verbs of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def fetch(tensor: Tensor, what: str, device: Device, monitor: Monitor) -> Tensor:
    """`tensor` in the host's memory, once all that the current stream was given so far has run.

    `.item()` would sit in the driver until then, or for ever where another rank is gone: nobody could say which. Here the
    host asks again and again whether the copy has happened, and looks meanwhile whether another rank has failed.

    Raises PipelineError: another rank failed or is gone, or `timeout_seconds` passed.
    """
    if not device.runs_ahead:
        return tensor
    copy = device.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    device.copy(copy, tensor)
    end = device.record(device.current())
    device.waited(what)
    doing = f"{monitor.name} waits for its device to give {what}"
    monitor.wait_polling(lambda: device.has_ended(end), lambda: doing)
    return copy


def bring(tensor: Tensor, where: torch.device, device: Device) -> Tensor:
    """`tensor` on the device, for what the current stream gets from now on; whoever gave it may overwrite it at once.

    `Tensor.to` would have the host wait until the stream has done what it was given, the optimizer's step for one: the driver
    copies from memory that it knows, and from any other only when its turn has come.
    """
    if not device.runs_ahead or where.type == "cpu" or not _is_plain(tensor):
        return tensor.to(where)
    staged = device.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    staged.copy_(tensor.detach())
    there = torch.empty_like(tensor, device=where)
    device.copy(there, staged)
    return there


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is bytes of the host, one after the other; of another one torch knows best what has to be kept."""
    known = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
    return known and not tensor.is_conj() and not tensor.is_neg()


# The device of this process ------------------------------------------------------------------------------------------


def choose_device(device: torch.device | str | None, *, shares_gpus: bool = False) -> torch.device:
    """`device`, or this rank's GPU where each rank of this machine can have one of its own, or the CPU. A GPU is made current.

    With `shares_gpus` several ranks may have one GPU, in turn: where there is any, each rank has one.

    Raises ValueError: `device` is neither the CPU nor a GPU.
    """
    set_variables_of_gpus()
    chosen: torch.device | None
    if device is not None:
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError):
            chosen = None
        if chosen is None or chosen.type not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r}: allowed are 'cpu', 'cuda' and 'cuda:N'")
    else:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        needed = 1 if shares_gpus else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        chosen = torch.device("cuda", local % num_gpus) if 0 < needed <= num_gpus else torch.device("cpu")
    if chosen.type == "cuda":
        _check_hardware_queues()
        chosen = torch.device("cuda", chosen.index or 0)
        torch.cuda.set_device(chosen)
    return chosen


def set_variables_of_gpus() -> None:
    """Sets what CUDA and NCCL read when they start, unless the user has set it.

    As many hardware queues as there can be; and transfers in the order in which the host launches them, over all
    communicators (NCCL 2.26 and later): the order that the schedule is proved in.
    """
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(_QUEUES, str(_NUM_QUEUES))


def _check_hardware_queues() -> None:
    """Streams that share a hardware queue wait for each other: nothing hangs, but little runs at the same time."""
    given = os.environ.get(_QUEUES)
    if given is None:
        warnings.warn(
            f"CUDA has started with 8 hardware queues before there was a pipeline, whose streams may then wait for each other: set "
            f"{_QUEUES}={_NUM_QUEUES} in the environment, or make the Pipeline before anything is put on a GPU",
            stacklevel=2,
        )
    elif not given.isdigit() or int(given) < _NUM_QUEUES:
        warnings.warn(
            f"{_QUEUES}={given}: with so few hardware queues a pipeline's streams wait for each other; set it to {_NUM_QUEUES}",
            stacklevel=2,
        )


def identity_of(gpu: torch.device) -> str:
    """A GPU as all processes of all machines call it."""
    properties = torch.cuda.get_device_properties(gpu)
    return f"the GPU {properties.uuid} ({properties.name}) of {socket.gethostname()}"
