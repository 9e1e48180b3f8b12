"""The order of what runs on a device whose host runs ahead, and memory that waits for it.

The host frees memory, and uses it again, long before the device has read it. That is safe if its next use on the device
comes after all reads of it. The waits that the schedule has anyway say so; vector clocks follow them here
(Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988), a count of ops per stream.

Two things ask for it. What was sent was allocated on the compute stream, and is let go of when that stream comes after the
SEND. What is received lies in a `Ring` of buffers that are used again. So nothing is under `record_stream`, whose blocks come back only
when the device gets there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

from pipetrain.comm.forms import TensorForm
from pipetrain.schedule.op import Lane, Op, Queue

Moment = int  # so many ops of a lane have been launched


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


_NOTHING: dict[Queue, int] = {}
