"""One rank's part of a schedule, laid out for the executor's loop: queues of ops, and which op ends the wait of which.

    queue 0     compute      0F0 0F1 0F2 ...            an op has its turn when all that it waits for has ended and the op
    queue 1     recompute    0R0 0R1 ...                before it in its queue has had its own
    queue 2...  transfers    0SEND_F0 0SEND_F1 ...      one queue for each stage edge and direction, sends before receives

This is all that the executor obeys, and it obeys it for every op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipetrain.schedule.kinds import FINISHING, MESSAGE_LANES, RECOMPUTE, Kind, Lane
from pipetrain.schedule.op import Op
from pipetrain.schedule.schedule import Schedule

COMPUTING = (Lane.COMPUTE, Lane.RECOMPUTE)  # the first queues of a program; where both may go on, the first does


@dataclass(frozen=True)
class Program:
    """The ops of one rank, numbered queue after queue; `queues[q]` are the numbers of one queue, in `lanes[q]`.

    `waits[n]` are the ops that op n waits for, `followers[n]` the ops that wait for op n. `recomputed` are the
    (stage, microbatch) with an R: the others keep the set of their F. `split` are those whose backward comes in two halves.
    """

    schedule: Schedule
    ops: tuple[Op, ...]
    number: dict[Op, int]
    lanes: tuple[Lane, ...]
    queues: tuple[range, ...]
    waits: tuple[tuple[Op, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    recomputed: frozenset[tuple[int, int | None]]
    split: frozenset[tuple[int, int | None]]

    @staticmethod
    def of(schedule: Schedule, rank: int) -> Program:
        """The part of `rank` in a schedule that `check` has passed."""
        ops: list[Op] = []
        lanes, queues = [], []
        for lane, own in _queues(schedule, rank):
            lanes.append(lane)
            queues.append(range(len(ops), len(ops) + len(own)))
            ops += own
        number = {op: place for place, op in enumerate(ops)}
        waits = tuple(schedule.waits.get(op, ()) for op in ops)
        followers: list[list[int]] = [[] for _ in ops]
        for place, own_waits in enumerate(waits):
            for awaited in own_waits:
                followers[number[awaited]].append(place)
        return Program(
            schedule,
            tuple(ops),
            number,
            tuple(lanes),
            tuple(queues),
            waits,
            tuple(map(tuple, followers)),
            frozenset((op.stage, op.microbatch) for op in ops if op.kind is RECOMPUTE),
            frozenset((op.stage, op.microbatch) for op in ops if op.kind in FINISHING),
        )


def _queues(schedule: Schedule, rank: int) -> Iterator[tuple[Lane, tuple[Op, ...]]]:
    for lane in COMPUTING:
        yield lane, schedule.lane(rank, lane)
    # Sends first: of two transfers that may start at once, the send is what another rank waits for.
    for lane in MESSAGE_LANES:
        transfers: dict[tuple[int, Kind], list[Op]] = {}
        for op in schedule.lane(rank, lane):
            transfers.setdefault((op.stage, op.kind), []).append(op)
        yield from ((lane, tuple(own)) for own in transfers.values())


class Turns:
    """How far one run of a program has come. For one thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._open = [len(waits) for waits in program.waits]  # what each op still waits for
        self._heads = [queue.start for queue in program.queues]  # the first of each queue that had no turn yet
        self._ended = [False] * len(program.ops)
        self._num_left = len(program.ops)

    @property
    def over(self) -> bool:
        """Whether every op has ended."""
        return self._num_left == 0

    def take(self, queue: int) -> int | None:
        """The op of this queue whose turn it is, which then has had it; None where there is none or it still waits."""
        head = self._heads[queue]
        if head == self._program.queues[queue].stop or self._open[head]:
            return None
        self._heads[queue] = head + 1
        return head

    def end(self, place: int) -> None:
        """This op has ended: those that wait for it wait for one op less."""
        assert not self._ended[place], f"{self._program.ops[place]} ended twice"
        self._ended[place] = True
        self._num_left -= 1
        for follower in self._program.followers[place]:
            self._open[follower] -= 1

    def awaited(self) -> tuple[Op, Op]:
        """Where nothing may start: the first op that has not ended, and the transfer under way for which it has not.

        The two are the same where all that is left is a transfer under way.
        """
        program = self._program
        under_way = first = next(place for place, ended in enumerate(self._ended) if not ended)
        while not self._had_its_turn(under_way):
            waits = (program.number[op] for op in program.waits[under_way])
            under_way = next((place for place in waits if not self._ended[place]), under_way - 1)
        return program.ops[first], program.ops[under_way]

    def _had_its_turn(self, place: int) -> bool:
        return any(place in queue and place < head for queue, head in zip(self._program.queues, self._heads))
