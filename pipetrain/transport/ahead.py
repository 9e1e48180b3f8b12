"""What comes after what on a device on which the host runs ahead, and memory that waits for it.

The host frees memory, and uses it again, long before the device has read it. That is safe where what comes next on the
device comes after who read it, and the waits that the schedule has anyway say so: they are followed here by vector clocks
(Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988), a count of ops per stream.

Two things ask for it. What was sent was allocated on the compute stream, and is let go of when that stream comes after the
SEND. What is received lies in buffers that are used again: see `rings.py`. So nothing is under `record_stream`, whose blocks
come back only when the device gets there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable

from pipetrain.schedule.op import Lane, Op

Line = Hashable  # a stream of the lanes: `Lane.COMPUTE`, `Lane.RECOMPUTE`, `Lane.REDUCE`, or stage and kind of a queue of messages
Moment = int  # so many ops of the compute lane have been launched


class Ahead:
    """The clocks of one rank's streams. For the thread that launches.

    An op's clock has a count for each line: how many of its ops have ended when the op has.
    """

    def __init__(self) -> None:
        self._clocks: dict[Line, dict[Line, int]] = {}  # of what a line is given next
        self._ends: dict[Op, dict[Line, int]] = {}
        self._joined: dict[Line, int] = {}  # what every line comes after
        self._is_open = False  # whether an op of the compute lane is being launched
        self._held: dict[Line, deque[tuple[int, Callable[[], None]]]] = {}
        self._watchers: list[Callable[[Moment], None]] = []

    def watch(self, look: Callable[[Moment], None]) -> None:
        """`look(moment)` is called before each op is launched: what has been let go of by now was read before `moment`."""
        self._watchers.append(look)

    def launch(self, line: Line, waits: Iterable[Op]) -> None:
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

    def end(self, line: Line, op: Op) -> None:
        """`op` was given to `line`, and its end is an event that others may wait for."""
        clock = self._clock(line)
        clock[line] = clock.get(line, 0) + 1
        self._ends[op] = dict(clock)
        if line is Lane.COMPUTE:
            self._is_open = False

    def hold(self, line: Line, op: Op, let_go: Callable[[], None]) -> None:
        """Call `let_go` when the compute stream comes after `op`, which `line` was given."""
        self._held.setdefault(line, deque()).append((self._ends[op][line], let_go))

    def comes_after(self, line: Line, moment: Moment) -> bool:
        """Whether what `line` is given from now on comes after all that the compute lane had been given at `moment`."""
        return moment <= max(self._clock(line).get(Lane.COMPUTE, 0), self._joined.get(Lane.COMPUTE, 0))

    def join(self) -> None:
        """From now on every line comes after all that any was given."""
        self._joined = {line: clock.get(line, 0) for line, clock in self._clocks.items()}
        self._ends.clear()
        self._is_open = False
        self._let_go(self._joined)

    def _clock(self, line: Line) -> dict[Line, int]:
        return self._clocks.setdefault(line, {})

    def _let_go(self, clock: dict[Line, int]) -> None:
        for line, held in self._held.items():
            passed = max(clock.get(line, 0), self._joined.get(line, 0))
            while held and held[0][0] <= passed:
                held.popleft()[1]()


_NOTHING: dict[Line, int] = {}
