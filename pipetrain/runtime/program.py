"""One rank's part of a schedule, laid out for the executor's loop: queues of ops, and for each op the ops that wait for it.

    transfers    0SEND_F0 0SEND_F1 ...      a queue per stage and kind of message, sends before receives; then one of REDUCE_GRADs
    copies       0OFFLOAD1 0OFFLOAD2 ...    a queue of OFFLOADs, then one of RELOADs
    compute      0F0 0F1 0F2 ...
    recompute    0R0 0R1 ...

An op may start when all ops that it waits for have ended and the op before it in its queue has started. One exception: if a copy
(OFFLOAD, RELOAD) waits for copies of other sets, it is started, and the thread of its lane waits. If two ops may start, the one in the upper queue starts. If the
host launches ahead of a device, there is one queue: the launch order. The executor follows these rules, and no others, for every op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipetrain.schedule.kinds import COPY_LANES, FINISHING, MESSAGE_LANES, RECOMPUTE, Direction, Kind, Lane
from pipetrain.schedule.messages import receive_of, send_of, source_of, writes_boundary
from pipetrain.schedule.op import Op
from pipetrain.schedule.schedule import Schedule

COMPUTING = (Lane.COMPUTE, Lane.RECOMPUTE)  # if the next op of each may start, compute goes first

Places = frozenset[tuple[int, int | None]]  # (stage, microbatch)


@dataclass(frozen=True, slots=True)
class ProgramEntry:
    """An op of a rank, and what the executor needs to know of the schedule to run it.

    `reads` is the op that brings the boundary tensor which `op` takes: a receive (`is_received`), or an op of the neighbouring stage on
    this rank. `writes` is the key of the boundary tensor that `op` makes: its SEND, or `op` itself if this rank has the next stage.
    """

    op: Op
    lane: Lane
    microbatch: int  # -1: the op belongs to no microbatch
    waits: tuple[Op, ...]
    # Those of `waits` for which the copy's thread waits, not the loop: copies of other sets. Empty if the host runs ahead.
    waits_of_thread: tuple[Op, ...]
    reads: Op | None
    is_received: bool
    writes: Op | None
    keep: bool  # F: its set stays, and no R follows
    moves: bool  # F: its set goes to host memory
    split: bool  # F: its backward is split into I and W
    has_backward: bool  # the op's stage has backwards in this schedule
    is_last: bool  # the op is of the last stage

    @staticmethod
    def of(schedule: Schedule, op: Op, lane: Lane, recomputed: Places, split: Places) -> ProgramEntry:
        place, row, writes = (op.stage, op.microbatch), op.kind.row, None
        if row.send_kind is not None and row.direction is not None and writes_boundary(op):
            first = 0 if row.direction is Direction.FORWARD else schedule.first_backward
            if first <= op.stage + row.direction < schedule.num_stages:
                writes = send_of(schedule, op) or op
        waits = schedule.waits.get(op, ())
        has_thread = lane in COPY_LANES and not schedule.launch_order
        return ProgramEntry(
            op,
            lane,
            -1 if op.microbatch is None else op.microbatch,
            waits,
            tuple(other for other in waits if _copies_another(other, op)) if has_thread else (),
            source_of(schedule, op) if op.kind.computes else None,
            receive_of(schedule, op) is not None,
            writes,
            keep=place not in recomputed,
            moves=place in schedule.offloaded,
            split=place in split,
            has_backward=op.stage >= schedule.first_backward,
            is_last=op.stage == schedule.num_stages - 1,
        )


def _copies_another(other: Op, op: Op) -> bool:
    """Whether `other` is an OFFLOAD or a RELOAD of another set, or of another part, than `op`."""
    return other.kind.row.lane in COPY_LANES and other._replace(kind=op.kind) != op


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one rank, numbered from 0: compute lane, recompute lane, other queues; or all in launch order if the schedule has one.

    `queues[q]` has the numbers of one queue. The executor tries the queues in this order, so compute and recompute lane come last.
    `followers[n]` has the ops that wait for op n. `recomputed` has the (stage, microbatch) with an R; all others keep the set of F.
    """

    schedule: Schedule
    ops: tuple[Op, ...]
    number: dict[Op, int]
    entries: tuple[ProgramEntry, ...]
    queues: tuple[range, ...]
    followers: tuple[tuple[int, ...], ...]
    recomputed: Places
    reduces: tuple[Op, ...]  # the REDUCE_GRAD ops
    num_waits: tuple[int, ...]  # for how many ops the loop waits before each op: `waits` without `waits_of_thread`
    starts: tuple[int, ...]  # the first op of each queue

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
        recomputed = frozenset((op.stage, op.microbatch) for op in ops if op.kind is RECOMPUTE)
        split = frozenset((op.stage, op.microbatch) for op in ops if op.kind in FINISHING)
        entries = tuple(ProgramEntry.of(schedule, op, lane_of[op], recomputed, split) for op in ops)
        followers: list[list[int]] = [[] for _ in ops]
        for place, entry in enumerate(entries):
            for awaited in entry.waits:
                if awaited in entry.waits_of_thread:
                    continue
                followers[number[awaited]].append(place)
        queues = [*queues[len(COMPUTING) :], *queues[: len(COMPUTING)]]
        return Program(
            schedule,
            tuple(ops),
            number,
            entries,
            tuple(queues),
            tuple(map(tuple, followers)),
            recomputed,
            schedule.lane(rank, Lane.REDUCE),
            tuple(len(entry.waits) - len(entry.waits_of_thread) for entry in entries),
            tuple(queue.start for queue in queues),
        )


def _queues(schedule: Schedule, rank: int) -> Iterator[tuple[Op, ...]]:
    if schedule.launch_order:
        yield schedule.launch_order[rank]
        return
    for lane in COMPUTING:
        yield schedule.lane(rank, lane)
    # Sends first: another rank may already wait for the message.
    for lane in MESSAGE_LANES:
        transfers: dict[tuple[int, Kind], list[Op]] = {}
        for op in schedule.lane(rank, lane):
            transfers.setdefault((op.stage, op.kind), []).append(op)
        yield from map(tuple, transfers.values())
    for lane in (Lane.REDUCE, *COPY_LANES):
        if ops := schedule.lane(rank, lane):
            yield ops
