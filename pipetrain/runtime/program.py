"""One rank's part of a schedule, laid out for the executor's loop: queues of ops, and which op ends the wait of which.

    transfers    0SEND_F0 0SEND_F1 ...      one queue for each stage edge and direction, sends before receives; one of reduces
    compute      0F0 0F1 0F2 ...
    recompute    0R0 0R1 ...

An op has its turn when all that it waits for has ended and the op before it in its queue has had its own; of two, the one in the
queue above. On a device, where the host launches ahead, there is one queue, the launch order of the schedule. This is all that
the executor obeys, and it obeys it for every op.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from pipetrain.schedule.kinds import FINISHING, MESSAGE_LANES, RECOMPUTE, Kind, Lane
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import EVERY, FIRST, OFF
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.segments import AnyStage

COMPUTING = (Lane.COMPUTE, Lane.RECOMPUTE)  # where both may go on, the first does


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one rank, numbered; those that compute first, or all as they are launched. Op n belongs to `lanes[n]`.

    `queues[q]` are the numbers of one queue; the first with an op that may start goes on. `waits[n]` are the ops that op n waits
    for, `followers[n]` the ops that wait for op n. `recomputed` are the (stage, microbatch) with an R: the others keep the set of
    their F. `split` are those whose backward comes in two halves. `reduces` are what adds up gradients.
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
    reduces: tuple[Op, ...]

    @staticmethod
    def of(schedule: Schedule, rank: int) -> Program:
        """The part of `rank` in a schedule that `check` has passed."""
        ops: list[Op] = []
        queues = []
        for own in _queues(schedule, rank):
            queues.append(range(len(ops), len(ops) + len(own)))
            ops += own
        number = {op: place for place, op in enumerate(ops)}
        lane_of = {op: lane for lane, own in schedule.lanes[rank].items() for op in own}
        waits = tuple(schedule.waits.get(op, ()) for op in ops)
        followers: list[list[int]] = [[] for _ in ops]
        for place, own_waits in enumerate(waits):
            for awaited in own_waits:
                followers[number[awaited]].append(place)
        return Program(
            schedule,
            tuple(ops),
            number,
            tuple(lane_of[op] for op in ops),
            (*queues[len(COMPUTING) :], *queues[: len(COMPUTING)]),
            waits,
            tuple(map(tuple, followers)),
            frozenset((op.stage, op.microbatch) for op in ops if op.kind is RECOMPUTE),
            frozenset((op.stage, op.microbatch) for op in ops if op.kind in FINISHING),
            schedule.lane(rank, Lane.REDUCE),
        )


def _queues(schedule: Schedule, rank: int) -> Iterator[tuple[Op, ...]]:
    if schedule.launch_order:
        yield schedule.launch_order[rank]
        return
    for lane in COMPUTING:
        yield schedule.lane(rank, lane)
    # Sends first: of two transfers that may start at once, the send is what another rank waits for.
    for lane in MESSAGE_LANES:
        transfers: dict[tuple[int, Kind], list[Op]] = {}
        for op in schedule.lane(rank, lane):
            transfers.setdefault((op.stage, op.kind), []).append(op)
        yield from map(tuple, transfers.values())
    if reduces := schedule.lane(rank, Lane.REDUCE):
        yield reduces


class Turns:
    """How far one run of a program has come. For one thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._open = [len(waits) for waits in program.waits]  # what each op still waits for
        self._heads = [queue.start for queue in program.queues]  # the first of each queue that had no turn yet
        self._ended = [False] * len(program.ops)
        self.num_left = len(program.ops)  # ops that have not ended

    def take(self) -> int | None:
        """The next op whose turn it is, which then has had it; None where there is none."""
        for queue, head in enumerate(self._heads):
            if head != self._program.queues[queue].stop and not self._open[head]:
                self._heads[queue] = head + 1
                return head
        return None

    def end(self, place: int) -> None:
        """This op has ended: those that wait for it wait for one op less."""
        assert not self._ended[place], f"{self._program.ops[place]} ended twice"
        self._ended[place] = True
        self.num_left -= 1
        for follower in self._program.followers[place]:
            self._open[follower] -= 1

    def awaited(self) -> tuple[Op, Op]:
        """Where nothing may start: the first op that has not started, and the transfer under way for which it has not.

        The two are the same where all that is left is transfers under way.
        """
        program = self._program
        heads = [head for queue, head in zip(program.queues, self._heads) if head < queue.stop]
        under_way = first = min(heads) if heads else self._ended.index(False)
        while not self._had_its_turn(under_way):
            waits = (program.number[op] for op in program.waits[under_way])
            under_way = next((place for place in waits if not self._ended[place]), under_way - 1)
        return program.ops[first], program.ops[under_way]

    def _had_its_turn(self, place: int) -> bool:
        return any(place in queue and place < head for queue, head in zip(self._program.queues, self._heads))


# Which microbatches are verified --------------------------------------------------------------------------------------

Places = frozenset[tuple[int, int | None]]  # (stage, microbatch)
_NOTHING: Places = frozenset()


class Proving:
    """The choice for one rank; `verify` is `recompute.verify`."""

    def __init__(self, stages: Mapping[int, AnyStage], verify: str | int) -> None:
        self._stages = stages
        self._verify = verify
        self._proved: set[Hashable] = set()
        self._recomputed: tuple[Program | None, list[tuple[int, list[int | None]]]] = (None, [])  # by stage

    def choose(self, signature: int, step: int, program: Program, idle: frozenset[int] = frozenset()) -> Places:
        """What is proved in this step, of a call with this signature; the microbatches `idle` do not run."""
        if self._verify == OFF:
            return _NOTHING
        kind = (signature, *self._flags())
        if kind not in self._proved:
            if first := _in_turn(program, 0, idle):  # nothing of a replica whose microbatches are all idle
                self._proved.add(kind)
            return first | (program.recomputed if self._verify == EVERY else _NOTHING)
        if self._verify == FIRST:
            return _NOTHING
        if self._verify == EVERY:
            return program.recomputed
        assert isinstance(self._verify, int)
        turn, rest = divmod(step, self._verify)
        return _NOTHING if rest else _in_turn(program, turn, idle) & program.recomputed

    def witnessed(self, step: int, program: Program) -> Places:
        """One recomputed microbatch of each stage, in turn."""
        if self._verify == OFF:
            return _NOTHING
        if self._recomputed[0] is not program:
            stages = sorted({stage for stage, _ in program.recomputed})
            numbers = {s: sorted((m for stage, m in program.recomputed if stage == s), key=str) for s in stages}
            self._recomputed = program, list(numbers.items())
        return frozenset((stage, numbers[step % len(numbers)]) for stage, numbers in self._recomputed[1])

    def _flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        layers = [layer for stage in self._stages.values() for layer in stage.layers]
        modes = [module.training for layer in layers for module in layer.modules()]
        return tuple(modes), tuple([one.requires_grad for layer in layers for one in layer.parameters()])


def _in_turn(program: Program, turn: int, idle: frozenset[int]) -> Places:
    """One microbatch of each stage: of those with an R where there are any, else of all."""
    found: dict[int, list[int | None]] = {}
    for kind in (Kind.F, Kind.R):
        ops = [op for op in program.ops if op.kind is kind and op.microbatch not in idle]
        found |= {stage: [op.microbatch for op in ops if op.stage == stage] for stage in {op.stage for op in ops}}
    found = {stage: list(dict.fromkeys(microbatches)) for stage, microbatches in found.items()}  # R may come in parts
    return frozenset((stage, microbatches[turn % len(microbatches)]) for stage, microbatches in found.items())
