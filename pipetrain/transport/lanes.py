"""Where the lanes of a rank run, and when each op ran: threads of one clock on a CPU, streams and events on a GPU.

Every crossing between lanes has the same three moments, on both:

    with lanes.on(lane, waits, op): [1] wait   for the ops that must have ended (a stream waits for their events)
        with lanes.timed(lane, op): [2] run    the op, in a range of its name for torch's profiler
                                    [3] record that it has ended (an event on the stream)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Kind, Lane, Op

# The events of a step, by start. On a GPU a call waits for the step to end on the device: not for the hot path.
Recording = Callable[[], tuple[OpEvent, ...]]


class Lanes(Protocol):
    """Binds the lanes of a rank to what its device has."""

    def start_step(self) -> None: ...
    def end_step(self) -> None: ...
    def on(self, lane: Lane, waits: Sequence[Op], op: Op) -> AbstractContextManager[None]: ...
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
    def on(self, lane: Lane, waits: Sequence[Op], op: Op) -> Iterator[None]:  # noqa: ARG002
        yield

    @contextmanager
    def timed(self, lane: Lane, op: Op) -> Iterator[None]:
        start = self._clock()
        with _profiled(op):
            yield
        self._events.append(OpEvent(self._rank, lane, op, start, self._clock()))

    def record(self, lane: Lane, op: Op, start: float, end: float) -> None:
        self._events.append(OpEvent(self._rank, lane, op, start, end))

    def recording(self) -> Recording:
        events = self._events
        return lambda: _by_start(events)


class CudaLanes:
    """Lanes as CUDA streams: compute at high priority, recompute at low, so that R yields to F and B.

    In the lanes of messages each stage edge and direction has a stream of its own. Not yet run on a machine with a GPU.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._compute = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._recompute = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self._messages: dict[tuple[int, Kind], torch.cuda.Stream] = {}
        self._ended: dict[Op, torch.cuda.Event] = {}
        self._spans: list[tuple[Lane, Op, torch.cuda.Event, torch.cuda.Event]] = []
        self._host: list[OpEvent] = []
        self._zero: tuple[torch.cuda.Event, float] | None = None

    def start_step(self) -> None:
        self._ended.clear()
        self._spans, self._host = [], []
        caller = torch.cuda.current_stream(self._device)
        for stream in (self._compute, self._recompute, *self._messages.values()):
            stream.wait_stream(caller)  # [1] the optimizer wrote the parameters on the caller's stream
        zero = _timed_event()
        zero.record(self._compute)
        self._zero = (zero, time.perf_counter())

    def end_step(self) -> None:
        caller = torch.cuda.current_stream(self._device)
        for stream in (self._compute, self._recompute, *self._messages.values()):
            caller.wait_stream(stream)  # [3] gradients are complete for whatever the caller does next

    @contextmanager
    def on(self, lane: Lane, waits: Sequence[Op], op: Op) -> Iterator[None]:
        stream = self._stream(lane, op)
        for before in waits:
            if before in self._ended:
                stream.wait_event(self._ended[before])  # [1]
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def timed(self, lane: Lane, op: Op) -> Iterator[None]:
        stream = self._stream(lane, op)
        start, end = _timed_event(), _timed_event()
        start.record(stream)
        with _profiled(op):
            yield  # [2]
        end.record(stream)  # [3]
        self._ended[op] = end
        self._spans.append((lane, op, start, end))

    def record(self, lane: Lane, op: Op, start: float, end: float) -> None:
        self._host.append(OpEvent(self._rank, lane, op, start, end))

    def join(self, op: Op) -> None:
        """Let the current stream wait for the end of `op`."""
        torch.cuda.current_stream(self._device).wait_event(self._ended[op])

    def share(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor`, allocated on another stream, until F, R and B that use it have run."""
        tensor.record_stream(self._compute)
        tensor.record_stream(self._recompute)

    @staticmethod
    def producer_of(op: Op) -> Op:
        """The op whose result a SEND carries."""
        return Op(op.stage, Kind.F if op.kind is Kind.SEND_F else Kind.B, op.microbatch)

    def _stream(self, lane: Lane, op: Op) -> torch.cuda.Stream:
        if lane is Lane.COMPUTE:
            return self._compute
        if lane is Lane.RECOMPUTE:
            return self._recompute
        key = (op.stage, op.kind)
        if key not in self._messages:
            self._messages[key] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._messages[key]

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


def sharing(lanes: Lanes, ahead: int) -> Callable[[torch.Tensor], None] | None:
    """What to do with a tensor that R brings, so that its memory is not given away while B still reads it.

    A block belongs to the stream that allocated it, and R's stream takes it back when B has been launched. With one set
    alive R's stream waits for the last B before it allocates; with more it does not.
    """
    return lanes.share if isinstance(lanes, CudaLanes) and ahead > 1 else None


def _by_start(events: Iterable[OpEvent]) -> tuple[OpEvent, ...]:
    return tuple(sorted(events, key=lambda event: event.start))


def _profiled(op: Op) -> AbstractContextManager[object]:
    """A range of the op's name, where torch's profiler is on: without it a range is a tenth of what an op costs us."""
    return record_function(str(op)) if _profiler_enabled() else nullcontext()


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_lanes(rank: int, device: torch.device) -> Lanes:
    return CudaLanes(rank, device) if device.type == "cuda" else CpuLanes(rank)
