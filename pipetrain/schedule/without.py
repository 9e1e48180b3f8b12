"""The pass that takes microbatches out of a schedule: what is left keeps its order, its waits and its bounds.

    compute  F0 F1 F2 B0 B1 B2             without 1:  F0 F2 B0 B2
    R2 waits for F2 and B1                             R2 waits for F2 and B0        [1] B0 ended before B1
    SEND_F2 waits through SEND_F1 for F3               SEND_F2 waits for F3          [2] what is gone cannot wait for it

Of two ops that are left, the rank runs one after the other exactly where it did before. Hence no op waits in a new circle, and at
each moment a stage holds what it held, less what is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter

from pipetrain.schedule.kinds import MESSAGE_LANES, TRANSFER_LANES
from pipetrain.schedule.op import Op
from pipetrain.schedule.schedule import Schedule

_Queue = tuple[object, ...]
_Clock = dict[_Queue, int]  # of each queue the number of the last op that has ended, and with it those before


def without_microbatches(schedule: Schedule, skipped: frozenset[int]) -> Schedule:
    """`schedule`, which `check` has passed, without the ops of the microbatches `skipped`; the others keep their numbers.

    Of one for several replicas all may go: its REDUCE_GRAD stay, as those of the other replicas wait for them.

    Raises:
        ValueError: microbatches that are not in the schedule, or none is left of a schedule for one replica.
    """
    if not skipped:
        return schedule
    present = set(schedule.microbatches)
    if not (skipped <= present if schedule.num_replicas > 1 else skipped < present):
        raise ValueError(
            f"cannot leave out microbatches {sorted(skipped)} of {list(schedule.microbatches)}: some of these, not all"
        )
    return dataclasses.replace(
        schedule,
        lanes=tuple(
            {lane: tuple(op for op in ops if op.microbatch not in skipped) for lane, ops in lanes.items()}
            for lanes in schedule.lanes
        ),
        waits=dict(_Rest(schedule, skipped).waits()),
        kept=frozenset(place for place in schedule.kept if place[1] not in skipped),
        skipped=schedule.skipped | skipped,
        launch_order=tuple(tuple(op for op in ops if op.microbatch not in skipped) for ops in schedule.launch_order),
    )


class _Clocks:
    """Of each op, what has ended on its rank when it starts, and when it ends, whatever the timing."""

    def __init__(self, schedule: Schedule) -> None:
        self.queues: dict[_Queue, list[Op]] = {}
        self.place: dict[Op, tuple[_Queue, int]] = {}
        for rank, lane, op in schedule.ops():
            queue: _Queue = (rank, lane, op.stage, op.kind) if lane in MESSAGE_LANES else (rank, lane)
            ops = self.queues.setdefault(queue, [])
            self.place[op] = queue, len(ops)
            ops.append(op)
        self.at_start: dict[Op, _Clock] = {}
        self.at_end: dict[Op, _Clock] = {}
        after = {op: (*schedule.waits.get(op, ()), *self.before(op)) for op in self.place}
        for op in TopologicalSorter(after).static_order():
            queue, number = self.place[op]
            awaited = [self.at_end[other] for other in schedule.waits.get(op, ())]
            self.at_start[op] = _latest([*awaited, *map(self.when_next_may_start, self.before(op))])
            ended = [self.at_end[other] for other in self.before(op)]  # transfers of a queue end in their order
            self.at_end[op] = {**_latest([self.at_start[op], *ended]), queue: number}

    def before(self, op: Op) -> list[Op]:
        """The op before it in its queue; none for the first."""
        queue, number = self.place[op]
        return self.queues[queue][max(number - 1, 0) : number]

    def when_next_may_start(self, op: Op) -> _Clock:
        """What has ended when the next op of its queue may start: of transfers, what had to end for this one to start."""
        return self.at_start[op] if op.kind.row.lane in TRANSFER_LANES else self.at_end[op]


class _Rest:
    """What is left, and what it waits for."""

    def __init__(self, schedule: Schedule, skipped: frozenset[int]) -> None:
        self._schedule = schedule
        self._skipped = skipped
        self._clocks = _Clocks(schedule)
        # By queue and number in it: the number of the last op up to there that is left, -1 for none.
        self._left: dict[_Queue, list[int]] = {}
        for queue, ops in self._clocks.queues.items():
            last = -1
            self._left[queue] = [last := number if self._is_left(op) else last for number, op in enumerate(ops)]

    def waits(self) -> Iterator[tuple[Op, tuple[Op, ...]]]:
        """The waits of each op that is left and has some."""
        for op in self._clocks.place:
            if self._is_left(op):
                waits = tuple(self._waits_of(op))
                if waits:
                    yield op, waits

    def _is_left(self, op: Op) -> bool:
        return op.microbatch not in self._skipped

    def _waits_of(self, op: Op) -> Iterator[Op]:
        awaited = self._schedule.waits.get(op, ())
        stay = [other for other in awaited if self._is_left(other)]
        yield from stay
        if len(stay) < len(awaited) or not all(map(self._is_left, self._clocks.before(op))):
            yield from self._instead(op, stay)

    def _instead(self, op: Op, stay: Iterable[Op]) -> Iterator[Op]:
        """The last op of each queue that came before `op`, where neither its queue nor another wait sees to it."""
        clocks = self._clocks
        queue, number = clocks.place[op]
        before = self._left[queue][number - 1] if number else -1
        known = [clocks.when_next_may_start(clocks.queues[queue][before])] if before >= 0 else []
        seen_to = self._of_left(_latest([*known, *(clocks.at_end[other] for other in stay)]))
        needed = {
            other: last for other, last in self._of_left(clocks.at_start[op]).items() if last > seen_to.get(other, -1)
        }
        for other, last in needed.items():
            ends = (
                self._of_left(clocks.at_end[clocks.queues[one][end]]) for one, end in needed.items() if one != other
            )
            if not any(end.get(other, -1) >= last for end in ends):
                yield clocks.queues[other][last]

    def _of_left(self, clock: _Clock) -> _Clock:
        return {queue: self._left[queue][number] for queue, number in clock.items()}


def _latest(clocks: Iterable[_Clock]) -> _Clock:
    found: _Clock = {}
    for clock in clocks:
        for queue, number in clock.items():
            if number > found.get(queue, -1):
                found[queue] = number
    return found
