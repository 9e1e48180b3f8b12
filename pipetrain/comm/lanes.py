"""Where the lanes of a rank run, and when each op ran: streams and events of its device.

Every crossing between lanes has the same three moments:

    with lanes.on(lane, waits, op): [1] wait   for the ops that must have ended (a stream waits for their events)
        with lanes.timed(lane, op): [2] run    the op, in a range of its name for torch's profiler
                                    [3] record that it has ended (an event on the stream)

And where the time of the thread that computes goes between two ops: it runs, it waits for a message, or it does neither.

op ── runs ── waits: no message is there ── neither ── runs ── next op
                                            │ ready to run, and not run: the machine runs others, or another thread has Python's lock
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from pipetrain.comm.ahead import Ahead
from pipetrain.comm.clocks import StepClock
from pipetrain.comm.device import HIGH, LOW, Device, Event, Stream, device_of
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Lane, Op, Queue, queue_of

_Span = tuple[Lane, Op, Event, Event]
_HERE = nullcontext()


@dataclass(frozen=True)
class Recording:
    """When the ops of a step ran.

    `events` gives them by start: on a GPU it waits for the step to end on the device, which is not for the hot path.
    `has_ended` says whether there is nothing to wait for any more; `error_seconds`, how wrong a time of `events` may be.
    """

    events: Callable[[], tuple[OpEvent, ...]]
    has_ended: Callable[[], bool]
    error_seconds: Callable[[], float]


class Lap(NamedTuple):
    """Seconds of the thread between two ops, which add up to all that passed."""

    ran: float
    waited: float
    stalled: float


class HostTime:
    """The clocks of the thread that calls."""

    def __init__(self) -> None:
        self._at = self._ran = self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it the thread waits for a message."""
        begun, ran = time.perf_counter(), time.thread_time()
        yield
        self._waited += time.perf_counter() - begun - (time.thread_time() - ran)

    def lap(self, now: float) -> Lap:
        """What passed since the last call; `now` is by `time.perf_counter`."""
        ran_until = time.thread_time()
        ran, passed, waited = ran_until - self._ran, now - self._at, self._waited
        self._at, self._ran, self._waited = now, ran_until, 0.0
        return Lap(ran, waited, max(passed - ran - waited, 0.0))


class Lanes:
    """Lanes as streams: compute and messages at high priority, recompute at low, so that R yields to F and B.

    In the lanes of messages each stage edge and direction has a stream of its own, and so has the lane `reduce`. An op that ended without an event (a
    message over gloo, of which a thread said so) has ended before what waits for it is launched.
    """

    def __init__(self, rank: int, device: Device) -> None:
        self.device = device
        self.ahead = Ahead() if device.runs_ahead else None
        self._rank = rank
        self._streams: dict[Queue, Stream] = {
            Lane.COMPUTE: device.stream(priority=HIGH),
            Lane.RECOMPUTE: device.stream(priority=LOW),
        }
        self._ended: dict[Op, Event] = {}
        self._spare: list[Event] = []
        self._spans: list[_Span] = []
        self._host: list[OpEvent] = []
        self._clock: StepClock | None = None
        self._host_time = HostTime()
        self._before: dict[Op, Lap] = {}  # what the host did since the op before

    def start_step(self) -> None:
        self._ended.clear()
        self._spans = [] if self.ahead is None else _Spans(self._spare)
        self._host, self._before = [], {}
        if self.ahead is not None:
            caller = self.device.current()
            for stream in self._streams.values():
                self.device.follow(stream, caller)  # [1] the optimizer wrote the parameters on the caller's stream
        self._clock = self.device.clock()
        self._host_time.lap(time.perf_counter())

    def end_step(self) -> None:
        if self.ahead is None:
            return
        caller = self.device.current()
        for stream in self._streams.values():
            self.device.follow(caller, stream)  # [3] gradients are complete for whatever the caller does next
        for stream in self._streams.values():
            self.device.follow(stream, caller)  # memory that one lane has read may go to another
        self.ahead.join()

    def on(self, lane: Lane, waits: Sequence[Op], op: Op) -> AbstractContextManager[Any]:
        """The stream of `op`, which waits from now on for the events of `waits`. If the host does not run ahead, they have happened."""
        if self.ahead is None:
            return _HERE
        stream = self._stream(lane, op)
        for before in waits:
            event = self._ended.get(before)
            if event is not None:
                self.device.wait(stream, event)  # [1]
        self.ahead.launch(queue_of(lane, op), waits)
        return self.device.on(stream)

    @contextmanager
    def timed(self, lane: Lane, op: Op) -> Iterator[None]:
        stream = None if self.ahead is None else self._stream(lane, op)
        start = self.device.record(stream, self._spare.pop() if self._spare else None)
        if self.ahead is None:  # a host that runs ahead has launched most ops before their device comes to them
            self._before[op] = self._host_time.lap(start)
        # A range only while torch's profiler is on: it costs a tenth of what an op costs us, even if off.
        with record_function(str(op)) if _profiler_enabled() else _HERE:
            yield  # [2]
        end = self.device.record(stream, self._spare.pop() if self._spare else None)  # [3]
        self._spans.append((lane, op, start, end))
        if self.ahead is None:
            self._host_time.lap(end)
        else:
            self._ended[op] = end
            self.ahead.end(queue_of(lane, op), op)

    def waiting(self) -> AbstractContextManager[None]:
        """Within it the thread that computes waits for a message."""
        return self._host_time.waiting()

    def mark(self, lane: Lane, op: Op) -> Event:
        """Mark the end of `op` on its stream; ops that wait for `op` wait for this event. `record` reports its span."""
        if self.ahead is None:
            return self.device.record(None)
        end = self._ended[op] = self.device.record(self._stream(lane, op))
        self.ahead.end(queue_of(lane, op), op)
        return end

    def record(self, lane: Lane, op: Op, start: float, end: float) -> None:
        """An op that ran on the host, in seconds of `time.perf_counter`. For any thread."""
        self._host.append(OpEvent(self._rank, lane, op, start, end))

    def recording(self) -> Recording:
        clock, spans, host, before = self._clock, self._spans, self._host, self._before
        assert clock is not None

        def resolve() -> tuple[OpEvent, ...]:
            found = [
                OpEvent(self._rank, lane, op, clock.read(start), clock.read(end), *before.get(op, ()))
                for lane, op, start, end in spans
            ]
            return tuple(sorted([*host, *found], key=lambda event: event.start))

        def has_ended() -> bool:
            return all(self.device.has_ended(end) for _, _, _, end in spans)

        return Recording(resolve, has_ended, clock.error_seconds)

    def _stream(self, lane: Lane, op: Op) -> Stream:
        queue = queue_of(lane, op)
        if queue not in self._streams:
            self._streams[queue] = self.device.stream(priority=HIGH)
        return self._streams[queue]


class _Spans(list[_Span]):
    """What one step records on a device; its events are used again when nobody asks for them any more."""

    def __init__(self, spare: list[Event]) -> None:
        super().__init__()
        self._spare = spare

    def __del__(self) -> None:
        for _, _, start, end in self:
            self._spare += (start, end)


def make_lanes(rank: int, device: torch.device) -> Lanes:
    return Lanes(rank, device_of(device))
