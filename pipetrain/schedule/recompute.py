"""The recompute pass: which sets are kept, which come back by an R, and where that R stands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Set

from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import LastStage, Mode
from pipetrain.schedule.schedule import Schedule

Sets = Set[tuple[int, int]]  # (stage, microbatch)


def add_recompute(schedule: Schedule, chosen: Sets = frozenset()) -> Schedule:
    """`schedule` with an R for each set that neither the policy nor `chosen` keeps.

        compute F and B       F0 F1 F2 B0 B1 B2
        never                 the same, all sets kept
        inline, early         F0 F1 F2 R0 B0 R1 B1 R2 B2
        overlap               the same as without R; on the recompute lane R0 R1 R2

    R follows the order of the B that read them, also over several stages of a rank, so that the two lanes cannot wait
    for each other in a circle.
    """
    policy = schedule.policy
    backwards = {(op.stage, op.microbatch or 0) for _, _, op in schedule.ops() if op.kind is Kind.B}
    if policy.mode is Mode.NEVER:
        return dataclasses.replace(schedule, kept=frozenset(backwards))
    kept = backwards & chosen
    if policy.last_stage is LastStage.AUTO:
        kept |= directly_followed(schedule)
    lanes = []
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        if policy.mode is Mode.OVERLAP:
            recompute = tuple(_recompute_of(op) for op in compute if _needs_recompute(op, kept))
            lanes.append({**schedule.lanes[rank], Lane.RECOMPUTE: recompute})
        else:
            lanes.append({**schedule.lanes[rank], Lane.COMPUTE: tuple(_with_recompute(compute, kept))})
    return dataclasses.replace(schedule, lanes=tuple(lanes), kept=frozenset(kept))


def directly_followed(schedule: Schedule) -> set[tuple[int, int]]:
    """The sets whose B comes right after their F on the compute lane: to recompute them would free nothing."""
    found = set()
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        for first, second in itertools.pairwise(compute):
            same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
            if same and first.kind is Kind.F and second.kind is Kind.B:
                found.add((first.stage, first.microbatch or 0))
    return found


def _needs_recompute(op: Op, kept: Sets) -> bool:
    return op.kind is Kind.B and (op.stage, op.microbatch) not in kept


def _recompute_of(op: Op) -> Op:
    return Op(op.stage, Kind.R, op.microbatch)


def _with_recompute(compute: Iterable[Op], kept: Sets) -> Iterable[Op]:
    for op in compute:
        if _needs_recompute(op, kept):
            yield _recompute_of(op)
        yield op
