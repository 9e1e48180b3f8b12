"""The pass of waits: what each op waits for in other lanes.

    [1] F waits for its input, B for its gradient          1F0 <- 1RECV_F0      1B0 <- 1RECV_B0
    [2] B waits for its set                                1B1 <- 1R1
    [3] R waits for its F and for a free activation slot   1R2 <- 1F2, 1B1      (one slot)
    [4] inline R waits for the gradient as well            1R2 <- 1RECV_B2
    [5] a send waits for what it sends                     1SEND_F0 <- 1F0
    [6] a receive waits until an earlier tensor is used    2RECV_F2 <- 2F0      (two tensors ahead)
        the first inputs, as many as the stage stashes at once, come without this wait
    [7] a gradient that is used after the last F           1RECV_B0 <- 1F6      (of 8 F, all before B0)
        waits for the last F but one
    [8] OFFLOAD waits for F, RELOAD for OFFLOAD,           1OFFLOAD2 <- 1F2     1RELOAD2 <- 1OFFLOAD2     1B2 <- 1RELOAD2
        and B for RELOAD
    [9] with copies, an op that takes a slot waits for     1F3 <- 1OFFLOAD1     1RELOAD1 <- 1B0
        the ops that free it, OFFLOAD for room on the host

With a split backward, [3] and [9] wait for W in place of B, because W frees the slot. Elsewhere I takes the place of B.

[9] follows `Schedule.order`: with K slots on a stage, its nth op that takes a slot waits for the first n - K ops that free one.
So at most K sets hold slots, whatever the timing.

Ops of one queue need no waits. If two neighbouring stages are on one rank, no receive is needed: [1] is the op that writes the tensor.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from pipetrain.schedule.alive import ENDS_SET, KEEPS_SET, peak_stash, places_freed, places_taken
from pipetrain.schedule.kinds import FINISHING, OFFLOAD, RECOMPUTE, RELOAD, Direction
from pipetrain.schedule.messages import receive_of, send_of, source_of
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule

Wait = tuple[Op, Op]  # (op, what it waits for)


def add_waits(schedule: Schedule, transport_ahead: int = 2) -> Schedule:
    """`schedule` with its waits. At most `transport_ahead` tensors of a link, or all stashed inputs if these are more, arrive before their use.
    A stage has memory for all inputs that it stashes at once (all in GPipe, the warm-up in 1F1B), so these may all come early.
    Otherwise they would take as much memory on the sender. With `transport_ahead=0` a receive is posted when the op before its
    consumer has ended.
    """
    waits: defaultdict[Op, list[Op]] = defaultdict(list)
    stash = peak_stash(schedule)
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        for op in compute:
            if (source := source_of(schedule, op)) is not None:
                waits[op].append(source)  # [1]
            if (send := send_of(schedule, op)) is not None:
                waits[send].append(op)  # [5]
        for op, awaited in (
            *_recompute_waits(schedule, rank, compute),
            *_receive_waits(schedule, compute, transport_ahead, stash),
        ):
            waits[op].append(awaited)
    own = {op: op for _, _, op in schedule.ops()}  # the Op objects in the lanes: equal copies would take memory
    return dataclasses.replace(
        schedule,
        waits={
            own.get(op, op): tuple(own.get(one, one) for one in dict.fromkeys(awaited)) for op, awaited in waits.items()
        },
    )


def _recompute_waits(schedule: Schedule, rank: int, compute: tuple[Op, ...]) -> Iterator[Wait]:
    if schedule.policy.mode is Mode.INLINE:
        for op in compute:
            if op.kind is RECOMPUTE and (gradient := source_of(schedule, read_by(schedule, op)[0])) is not None:
                yield op, gradient  # [4]
    if schedule.order:
        yield from _waits_with_copies(schedule, rank)
        return
    if schedule.policy.mode is not Mode.OVERLAP:
        return
    pools = {stage: _Pool(schedule, stage, compute) for stage in {op.stage for op in compute}}
    for op in schedule.lane(rank, Lane.RECOMPUTE):
        yield read_by(schedule, op)[0], op  # [2]
        yield op, Op(op.stage, op.kind.row.reads[0], op.microbatch)  # [3]
        full = pools[op.stage].last_full_before(op) if op.stage in pools else None
        if full is not None:
            yield op, full  # [3]


def _waits_with_copies(schedule: Schedule, rank: int) -> Iterator[Wait]:
    """The waits [2], [3], [8] and [9]. An R in the compute lane needs no [2] and [3], because the lane orders it."""
    overlaps = schedule.policy.mode is Mode.OVERLAP
    taken, copies = defaultdict[int, int](int), defaultdict[tuple[int, int | None, Kind], list[Op]](list)
    # By (stage, whether the op is an OFFLOAD): the ops that free slots, each with the number of slots freed before it.
    freed = defaultdict[tuple[int, bool], list[tuple[int, Op]]](list)
    ends = defaultdict[int, int](int)
    for op in schedule.order[rank]:
        stage, in_compute = op.stage, op.kind.row.lane_in(overlaps) is Lane.COMPUTE
        if not in_compute:
            (source,) = op.kind.row.reads
            yield op, Op(stage, source, op.microbatch, op.part if op.kind is RELOAD else None)
            if op.kind is not OFFLOAD:
                yield read_by(schedule, op)[0], op
            copies[stage, op.part, op.kind].append(op)
        if slots := places_taken(schedule, op):
            taken[stage] += slots
            most = taken[stage] - (schedule.policy.places_of(stage) or taken[stage])
            for of_copies in (True,) if in_compute else (True, False):
                own = freed[stage, of_copies]
                number = bisect.bisect_left(own, most, key=lambda pair: pair[0])
                yield from ((op, one) for _, one in own[max(0, number - 1) : number])
        if slots := places_freed(schedule, op):
            freed[stage, op.kind is OFFLOAD].append((ends[stage], op))
            ends[stage] += slots
    for stage, part, kind in [*copies]:
        if kind is OFFLOAD and (room := schedule.policy.host_sets_of(stage)) is not None:
            yield from zip(copies[stage, part, OFFLOAD][room:], copies[stage, part, RELOAD])


def read_by(schedule: Schedule, recompute: Op) -> tuple[Op, ...]:
    """The ops of the compute lane that read the set (or part) of an R, in order."""
    way = schedule.way(Direction.BACKWARD, recompute.stage, recompute.microbatch)
    return way if recompute.part is None else tuple(op for op in way if op.part == recompute.part)


class _Pool:
    """The activation slots of one stage along its compute lane. The last op of a set, or of a part, frees its slot.

    A kept set holds its slots from the start of its F to the end of its last op. When an R is placed, each set whose R is
    earlier in the recompute lane may hold a slot until its last op ends.
    """

    def __init__(self, schedule: Schedule, stage: int, compute: tuple[Op, ...]) -> None:
        self._schedule = schedule
        self._size = schedule.policy.places_of(stage)
        self._compute = compute
        self._place = {op: number for number, op in enumerate(compute) if op.stage == stage}
        self._recomputed_ends: list[int] = []  # ends of the sets that `last_full_before` was asked for, ascending
        self._ends: list[int] = []
        self._kept: list[int] = []  # for each of `_ends`: the slots that kept sets hold then
        kept, per_set = 0, schedule.policy.num_parts(stage)
        for op, number in self._place.items():
            is_kept = (stage, op.microbatch) in schedule.kept
            kept += per_set * (is_kept and op.kind in KEEPS_SET)
            if op.kind in ENDS_SET:
                self._ends.append(number)
                self._kept.append(kept)
                kept -= places_freed(schedule, op) * is_kept

    def last_full_before(self, recompute: Op) -> Op | None:
        """The op that `recompute` waits for: the last before its set is read during which no slot is free. None: no wait."""
        way = read_by(self._schedule, recompute)
        read, end = (self._place.get(op, len(self._compute)) for op in (way[0], way[-1]))
        found = None
        for number in range(bisect.bisect_left(self._ends, read) - 1, -1, -1):
            moment = self._ends[number]
            recomputed = len(self._recomputed_ends) - bisect.bisect_left(self._recomputed_ends, moment)
            if self._size is not None and self._kept[number] + recomputed >= self._size:
                found = self._compute[moment]
                break
        bisect.insort(self._recomputed_ends, end)
        return found


def _receive_waits(schedule: Schedule, compute: tuple[Op, ...], ahead: int, stash: tuple[int, ...]) -> Iterator[Wait]:
    used: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)  # positions of consumers, per queue of receives
    receives = [receive_of(schedule, op) for op in compute]
    # A rank receives over one network interface. Gradients that are used after all F (in GPipe all, elsewhere the last ones)
    # would delay the activations of the last F. So such a gradient is received when at most one activation is left to come.
    fed = [place for place, receive in enumerate(receives) if receive is not None and _goes(receive, Direction.FORWARD)]
    for place, receive in enumerate(receives):
        if receive is None:
            continue
        consumers, after = used[receive.stage, receive.kind], []
        if ahead == 0:
            first_use = _first_use(schedule, compute, place)
            after += [first_use - 1] if first_use > 0 else []  # [6]
        else:
            held_anyway = stash[receive.stage] if _goes(receive, Direction.FORWARD) else 0
            if len(consumers) >= max(ahead, held_anyway):
                after.append(consumers[-ahead])  # [6]
            if _goes(receive, Direction.BACKWARD) and len(fed) > 1 and place > fed[-1]:
                after.append(fed[-2])  # [7]
        if after:
            yield receive, compute[max(after)]
        consumers.append(place)


def _goes(op: Op, direction: Direction) -> bool:
    return op.kind.row.direction is direction


def _first_use(schedule: Schedule, compute: tuple[Op, ...], place: int) -> int:
    """The position of the first op that needs the tensor received for the op at `place`: its inline R, or that op itself."""
    reader = compute[place]
    if schedule.policy.mode is Mode.INLINE and _goes(reader, Direction.BACKWARD):
        recompute = Op(reader.stage, RECOMPUTE, reader.microbatch, reader.part)
        for before in range(place - 1, -1, -1):
            if compute[before] == recompute:
                return before
            if compute[before].kind not in FINISHING:
                break
    return place
