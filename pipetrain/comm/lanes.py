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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from pipetrain.comm.clocks import StepClock
from pipetrain.comm.device import HIGH, LOW, Device, Event, Stream, device_of
from pipetrain.comm.forms import TensorForm
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Lane, Op, Queue, queue_of

Moment = int  # so many ops of a lane have been launched
_Span = tuple[Lane, Op, Event, Event]
_NOTHING: dict[Queue, int] = {}
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


# The order of what runs on a device whose host runs ahead, and memory that waits for it.
#
# The host frees memory, and uses it again, long before the device has read it. That is safe if its next use on the device
# comes after all reads of it. The waits that the schedule has anyway say so; vector clocks follow them here
# (Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988), a count of ops per stream.
#
# Two things ask for it. What was sent was allocated on the compute stream, and is let go of when that stream comes after the
# SEND. What is received lies in a `Ring` of buffers that are used again. So nothing is under `record_stream`, whose blocks come back only
# when the device gets there.


class Ahead:
    """The clocks of one rank's streams. For the thread that launches.

    An op's clock has a count for each line, the stream of a queue: how many of its ops have ended when the op has.
    """

    def __init__(self) -> None:
        self._clocks: dict[Queue, dict[Queue, int]] = {}  # of what a line is given next
        self._ends: dict[Op, dict[Queue, int]] = {}
        self._joined: dict[Queue, int] = {}  # what every line comes after
        self._is_open = False  # whether an op of the compute lane is being launched
        self._held: dict[Queue, deque[tuple[int, Callable[[], None]]]] = {}
        self._watchers: list[Callable[[Moment], None]] = []

    def watch(self, look: Callable[[Moment], None]) -> None:
        """`look(moment)` is called before each op is launched: what has been let go of by now was read before `moment`."""
        self._watchers.append(look)

    def launch(self, line: Queue, waits: Iterable[Op]) -> None:
        """An op is about to be given to `line`, whose stream waits for the ends of `waits` now."""
        for look in self._watchers:
            look(self._clock(Lane.COMPUTE).get(Lane.COMPUTE, 0) + self._is_open)
        clock = self._clock(line)
        for op in waits:
            for other, count in self._ends.get(op, _NOTHING).items():
                if count > clock.get(other, 0):
                    clock[other] = count
        if line is Lane.COMPUTE:
            self._is_open = True
            self._let_go(clock)

    def end(self, line: Queue, op: Op) -> None:
        """`op` was given to `line`, and its end is an event that others may wait for."""
        clock = self._clock(line)
        clock[line] = clock.get(line, 0) + 1
        self._ends[op] = dict(clock)
        if line is Lane.COMPUTE:
            self._is_open = False

    def hold(self, line: Queue, op: Op, let_go: Callable[[], None]) -> None:
        """Call `let_go` when the compute stream comes after `op`, which `line` was given."""
        self._held.setdefault(line, deque()).append((self._ends[op][line], let_go))

    def moment(self, line: Queue) -> Moment:
        """How many ops `line` has been given."""
        return self._clock(line).get(line, 0)

    def comes_after(self, line: Queue, moment: Moment, other: Queue = Lane.COMPUTE) -> bool:
        """Whether what `line` is given from now on comes after all that the lane `other` had been given at `moment`."""
        return moment <= max(self._clock(line).get(other, 0), self._joined.get(other, 0))

    def join(self) -> None:
        """From now on every line comes after all that any was given."""
        self._joined = {line: clock.get(line, 0) for line, clock in self._clocks.items()}
        self._ends.clear()
        self._is_open = False
        self._let_go(self._joined)

    def _clock(self, line: Queue) -> dict[Queue, int]:
        return self._clocks.setdefault(line, {})

    def _let_go(self, clock: dict[Queue, int]) -> None:
        for line, held in self._held.items():
            passed = max(clock.get(line, 0), self._joined.get(line, 0))
            while held and held[0][0] <= passed:
                held.popleft()[1]()


class Ring:
    """The buffers of one queue of receives, used again: what it needs at once, and no more. For the thread that launches.

    Without it the host, which runs ahead, would allocate memory for messages that the device gets to much later. A buffer is free

        [1] on the host, when nobody else holds its memory: its F, R and B have been launched, and what was sent of it has been let go of
        [2] on the device, for a queue whose stream comes after what compute had been given by then

    so a receive into it comes after all that have read it, and no wait is added to those that the schedule has. Where these do not
    cover it yet, there is one buffer more.
    """

    def __init__(self, ahead: Ahead, line: Queue, device: torch.device) -> None:
        self._ahead = ahead
        self._line = line
        self._device = device
        self._taken: list[UntypedStorage] = []
        self._free: list[tuple[UntypedStorage, Moment]] = []  # [1] and when it was seen; the first one first
        ahead.watch(self._look)

    def take(self, form: TensorForm) -> Tensor:
        """A buffer for a tensor of this form. The current stream is that of the queue, which owns the memory."""
        return form.within(self.memory(form.num_bytes)) if form.num_bytes else form.empty(self._device)

    def memory(self, num_bytes: int) -> UntypedStorage:
        """Memory of at least `num_bytes`, likewise."""
        memory = self._used_again(num_bytes)
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self._taken.append(memory)
        return memory

    def _used_again(self, num_bytes: int) -> UntypedStorage | None:
        """The smallest free buffer that is large enough. Where none is, a free one goes: lengths may change from step to step."""
        free = [at for at, (_, moment) in enumerate(self._free) if self._ahead.comes_after(self._line, moment)]
        large = [at for at in free if self._free[at][0].nbytes() >= num_bytes]
        if large:
            return self._free.pop(min(large, key=lambda at: self._free[at][0].nbytes()))[0]
        if free:
            del self._free[free[0]]
        return None

    def _look(self, moment: Moment) -> None:
        """Whose memory has been let go of: called before each launch, so `moment` is when its last reader was launched."""
        free = [memory for memory in self._taken if torch._C._storage_Use_Count(memory._cdata) == 1]
        if free:
            self._free += [(memory, moment) for memory in free]
            self._taken = [memory for memory in self._taken if not any(memory is other for other in free)]
