"""The recompute pass: which sets are kept, which come back by an R, and where that R stands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from pipetrain.schedule.alive import KEEPS_SET
from pipetrain.schedule.families import ComputeLanes
from pipetrain.schedule.kinds import PASS_SEQUENCES, RECOMPUTE, Direction
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule, in_parts

Sets = Set[tuple[int, int]]  # (stage, microbatch)

_FIRST_READERS = frozenset(way[0] for way in PASS_SEQUENCES[Direction.BACKWARD])  # of a set


def add_recompute(schedule: Schedule, chosen: Sets = frozenset()) -> Schedule:
    """`schedule` with an R for each set that neither the policy nor `chosen` keeps.

        compute F and B       F0 F1 F2 B0 B1 B2
        never                 the same, all sets kept
        inline, early         F0 F1 F2 R0 B0 R1 B1 R2 B2
        overlap               the same as without R; on the recompute lane R0 R1 R2

        in parts, inline      F0 F1 F2 R0.1 B0.1 R0.0 B0.0 R1.1 B1.1 ...
        in parts, never       F0 F1 F2 B0 B1 B2; with several replicas F0 F1 F2 B0 B1 B2.1 B2.0

    With several replicas, the last B of a stage always runs in parts. Then only the gradients of one part are left to sum
    after it.

    R follows the order of the ops that first read the sets (B, or I), also over several stages of a rank, so that the two
    lanes cannot wait for each other in a cycle. If a schedule comes with R or with kept sets, from a file or a generator,
    it decides itself what is recomputed.

    Raises:
        ValueError: the schedule itself has R, but the mode or the schedule says that their sets are kept.
    """
    backwards = _places(schedule, _FIRST_READERS)
    written = _places(schedule, {RECOMPUTE})
    if schedule.policy.mode is Mode.NEVER and written:
        raise ValueError("recompute.mode=never, but the schedule itself has R; choose another mode or remove them")
    if schedule.kept & written:
        stage, microbatch = min(schedule.kept & written)
        raise ValueError(
            f"{Op(stage, RECOMPUTE, microbatch)} recomputes a set that the schedule itself keeps; remove it"
        )
    if schedule.policy.mode is Mode.NEVER or written or schedule.kept:
        kept = backwards - written
    else:
        kept = backwards & chosen
        kept |= kept_at_once(schedule)
    lanes = tuple(_with_lanes(schedule, dict(lanes), kept) for lanes in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes, kept=frozenset(kept))


class AllKept(list[list[Op]]):
    """Compute lanes that also say that all sets are kept, whatever the mode: what a generator, or a file, may give.

    The policy bounds them all the same: `sets` must allow as many at once.
    """


def keep_all(schedule: Schedule) -> Schedule:
    """`schedule`, F and backwards alone, with all its sets kept."""
    return dataclasses.replace(schedule, kept=frozenset(_places(schedule, _FIRST_READERS)))


def decides_itself(schedule: Schedule) -> bool:
    """Whether a schedule already has R or kept sets, so that the policy has no choice left."""
    return bool(schedule.kept) or any(op.kind is RECOMPUTE for _, _, op in schedule.ops())


def _places(schedule: Schedule, kinds: Set[Kind]) -> set[tuple[int, int]]:
    return {(op.stage, op.microbatch or 0) for _, _, op in schedule.ops() if op.kind in kinds}


def _with_lanes(schedule: Schedule, lanes: dict[Lane, tuple[Op, ...]], kept: Sets) -> dict[Lane, tuple[Op, ...]]:
    """The lanes of one rank with R where the mode wants it; R that stand there already stay in their order."""
    compute = lanes[Lane.COMPUTE]
    if not any(op.kind is RECOMPUTE for op in compute):

        def wanted(op: Op) -> bool:
            return (op.stage, op.microbatch) not in kept

        compute = tuple(with_recompute(_with_parts(schedule, compute, wanted), wanted))
    if schedule.policy.mode is not Mode.OVERLAP:
        return {**lanes, Lane.COMPUTE: compute}
    recompute = tuple(op for op in compute if op.kind is RECOMPUTE)
    return {**lanes, Lane.COMPUTE: tuple(op for op in compute if op.kind is not RECOMPUTE), Lane.RECOMPUTE: recompute}


def _with_parts(schedule: Schedule, compute: Sequence[Op], wanted: Callable[[Op], bool]) -> Iterator[Op]:
    """`compute` with a B per part in place of each B that is `wanted` and, with several replicas, of each stage's last B."""
    last = {op.stage: op for op in compute if op.kind in _FIRST_READERS}.values() if schedule.num_replicas > 1 else ()
    for op in compute:
        goes_in_parts = op.kind in _FIRST_READERS and op.part is None and (wanted(op) or op in last)
        yield from in_parts(op, schedule.policy.num_parts(op.stage)) if goes_in_parts else (op,)


def with_recompute(compute: Iterable[Op], wanted: Callable[[Op], bool]) -> Iterator[Op]:
    """`compute` with an R before each B, or I, that is `wanted`."""
    for op in compute:
        if op.kind in _FIRST_READERS and wanted(op):
            yield Op(op.stage, RECOMPUTE, op.microbatch, op.part)
        yield op


def kept_at_once(schedule: Schedule) -> set[tuple[int, int]]:
    """The sets that the policy keeps because they are `directly_followed`."""
    return {(stage, i) for stage, i in directly_followed(schedule) if schedule.policy.keeps_at_once(stage)}


def directly_followed(schedule: Schedule) -> set[tuple[int, int]]:
    """The sets whose B, or I, comes right after their F on the compute lane: to recompute them would free nothing."""
    found = set()
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        for first, second in itertools.pairwise(compute):
            same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
            if same and first.kind in KEEPS_SET and second.kind in _FIRST_READERS:
                found.add((first.stage, first.microbatch or 0))
    return found


def hold_back(schedule: Schedule, ordered: Sequence[Sequence[Op]]) -> Schedule:
    """`schedule`, made of the lanes `ordered`, in which each R also waits for the op in front of it there.

        order of a rank           F0 F1 F2 R1 B0 F3 R2 B1 ...
        compute                   F0 F1 F2 B0 F3 B1 ...
        recompute                 R1 R2 ...                     R2 waits for F3, also where a slot is free before

    Without this wait an R starts as soon as a slot is free. If the message of the rank's next op then arrives before the R ends, that
    op starts late. With it, no op starts later than in a run of the whole order, one op after the other.
    """
    if schedule.policy.mode is not Mode.OVERLAP:
        return schedule  # R stands in the compute lane itself
    waits = dict(schedule.waits)
    for lane in ordered:
        before = None
        for op in lane:
            if op.kind is not RECOMPUTE:
                before = op
            elif before is not None:
                waits[op] = tuple(dict.fromkeys((*waits.get(op, ()), before)))
    return dataclasses.replace(schedule, waits=waits)


def order_of(schedule: Schedule) -> ComputeLanes:
    """The ops of each rank one after the other. An R on its own lane comes where its waits have ended, whatever the timing.

    So `hold_back` adds no wait that `schedule` does not already imply.
    """
    lanes = [list(_in_one_order(schedule, rank)) for rank in range(schedule.num_ranks)]
    return lanes if any(op.kind is RECOMPUTE for lane in lanes for op in lane) else AllKept(lanes)


def _in_one_order(schedule: Schedule, rank: int) -> Iterator[Op]:
    late = list(reversed(schedule.lane(rank, Lane.RECOMPUTE)))
    ended: set[Op] = set()
    compute = schedule.lane(rank, Lane.COMPUTE)
    own = set(compute)
    for op in compute:
        yield op
        ended.add(op)
        while late and own.intersection(schedule.waits.get(late[-1], ())) <= ended:
            yield late.pop()
