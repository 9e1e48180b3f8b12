"""The pass that takes microbatches out of a schedule: what is left keeps its order, its waits and its bounds.

    compute  F0 F1 F2 B0 B1 B2       without 1:  F0 F2 B0 B2
    R2 waits for F2, B1                          R2 waits for F2, B0     [1] B0 ran before B1
    SEND_F2 waits through SEND_F1                SEND_F2 waits for what SEND_F1 waited for   [2]

[1] A wait for an op that is gone becomes waits for what that op came after: what it waited for, and the op before it in its
queue. [2] What an op that is gone waited for, those after it in its queue came after, too: the first of them waits for it.

So of two ops that are left, one comes after the other exactly where it did before, as far as one rank can see it. Hence nothing
new can go round in a circle, and at each moment a stage holds what it held before, less what is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter

from pipetrain.schedule.kinds import MESSAGE_LANES
from pipetrain.schedule.op import Op
from pipetrain.schedule.schedule import Schedule

_Queue = tuple[object, ...]
_Ended = Mapping[
    _Queue, int
]  # of each queue the last op that has ended, by its number; those before it have ended, too


def without_microbatches(schedule: Schedule, skipped: frozenset[int]) -> Schedule:
    """`schedule`, which `check` has passed, without the ops of the microbatches `skipped`; the others keep their numbers.

    Raises:
        ValueError: microbatches that are not in the schedule, or none is left.
    """
    if not skipped:
        return schedule
    if not skipped < set(schedule.microbatches):
        raise ValueError(
            f"cannot leave out microbatches {sorted(skipped)} of {list(schedule.microbatches)}: some of these, not all"
        )
    return dataclasses.replace(
        schedule,
        lanes=tuple(
            {lane: tuple(op for op in ops if op.microbatch not in skipped) for lane, ops in lanes.items()}
            for lanes in schedule.lanes
        ),
        waits=dict(_Bridges(schedule, skipped).waits()),
        kept=frozenset(place for place in schedule.kept if place[1] not in skipped),
        skipped=schedule.skipped | skipped,
    )


class _Bridges:
    """What ops wait for, over those that are gone."""

    def __init__(self, schedule: Schedule, skipped: frozenset[int]) -> None:
        self._schedule = schedule
        self._skipped = skipped
        self._queues: dict[_Queue, list[Op]] = {}
        self._place: dict[Op, tuple[_Queue, int]] = {}
        for rank, lane, op in schedule.ops():
            queue: _Queue = (rank, lane, op.stage, op.kind) if lane in MESSAGE_LANES else (rank, lane)
            ops = self._queues.setdefault(queue, [])
            self._place[op] = queue, len(ops)
            ops.append(op)
        # Of an op that is gone: what has ended when it starts (but in its own queue), and when it ends.
        self._at_start: dict[Op, _Ended] = {}
        self._at_end: dict[Op, _Ended] = {}
        for op in TopologicalSorter(
            {op: set(self._gone_before(op)) for op in self._place if self._is_gone(op)}
        ).static_order():
            self._at_start[op] = self._waited_for(op, self._schedule.waits.get(op, ()))
            before = self._before(op)
            self._at_end[op] = _latest(self._at_start[op], {} if before is None else self._ended_with(before))

    def waits(self) -> Iterator[tuple[Op, tuple[Op, ...]]]:
        """The waits of each op that is left and has some."""
        for op in self._place:
            if self._is_gone(op):
                continue
            awaited = self._schedule.waits.get(op, ())
            stay = [other for other in awaited if not self._is_gone(other)]
            instead = self._waited_for(op, [other for other in awaited if self._is_gone(other)])
            found = (*stay, *self._needed(op, stay, instead))
            if found:
                yield op, found

    def _is_gone(self, op: Op) -> bool:
        return op.microbatch in self._skipped

    def _before(self, op: Op) -> Op | None:
        """The op before it in its queue."""
        queue, number = self._place[op]
        return self._queues[queue][number - 1] if number else None

    def _gone_before(self, op: Op) -> Iterator[Op]:
        """The ops that are gone and that `op` comes after at once."""
        before = self._before(op)
        for other in (*self._schedule.waits.get(op, ()), *(() if before is None else (before,))):
            if self._is_gone(other):
                yield other

    def _waited_for(self, op: Op, awaited: list[Op] | tuple[Op, ...]) -> _Ended:
        """What has ended when `op` starts: by these waits of its own [1], and those of what is gone before it [2]."""
        ended = _latest(*map(self._ended_with, awaited))
        before = self._before(op)
        return _latest(ended, self._at_start[before]) if before is not None and self._is_gone(before) else ended

    def _ended_with(self, op: Op) -> _Ended:
        if self._is_gone(op):
            return self._at_end[op]
        queue, number = self._place[op]
        return {queue: number}

    def _needed(self, op: Op, stay: list[Op], instead: _Ended) -> Iterator[Op]:
        """Of `instead` what neither the waits that stay nor, where its ops end in order, its own queue bring about."""
        brought = dict(_latest(*map(self._ended_with, stay)))
        queue, number = self._place[op]
        if op.kind.row.lane not in MESSAGE_LANES:
            brought[queue] = number
        for other, last in instead.items():
            if last > brought.get(other, -1):
                yield self._queues[other][last]


def _latest(*several: _Ended) -> _Ended:
    found: dict[_Queue, int] = {}
    for ended in several:
        for queue, number in ended.items():
            found[queue] = max(number, found.get(queue, -1))
    return found
