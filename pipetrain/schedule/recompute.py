"""The recompute pass: which sets are kept, which come back by an R, and where that R stands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Set

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
    for each other in a circle. A schedule that comes with R, from a file, has already said what is recomputed.
    """
    policy = schedule.policy
    backwards = _places(schedule, Kind.B)
    written = _places(schedule, Kind.R)
    if policy.mode is Mode.NEVER:
        if written:
            raise ValueError("recompute.mode=never, but the schedule itself has R; choose another mode or remove them")
        return dataclasses.replace(schedule, kept=frozenset(backwards))
    if written:
        kept = backwards - written
    else:
        kept = backwards & chosen
        if policy.last_stage is LastStage.AUTO:
            kept |= directly_followed(schedule)
    lanes = tuple(_with_lanes(dict(lanes), policy.mode, kept) for lanes in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes, kept=frozenset(kept))


def _places(schedule: Schedule, kind: Kind) -> set[tuple[int, int]]:
    return {(op.stage, op.microbatch or 0) for _, _, op in schedule.ops() if op.kind is kind}


def _with_lanes(lanes: dict[Lane, tuple[Op, ...]], mode: Mode, kept: Sets) -> dict[Lane, tuple[Op, ...]]:
    """The lanes of one rank with R where the mode wants it; R that stand there already stay in their order."""
    compute = lanes[Lane.COMPUTE]
    if not any(op.kind is Kind.R for op in compute):
        compute = tuple(with_recompute(compute, lambda op: (op.stage, op.microbatch) not in kept))
    if mode is not Mode.OVERLAP:
        return {**lanes, Lane.COMPUTE: compute}
    recompute = tuple(op for op in compute if op.kind is Kind.R)
    return {**lanes, Lane.COMPUTE: tuple(op for op in compute if op.kind is not Kind.R), Lane.RECOMPUTE: recompute}


def with_recompute(compute: Iterable[Op], wanted: Callable[[Op], bool]) -> Iterator[Op]:
    """`compute` with an R before each B that is `wanted`."""
    for op in compute:
        if op.kind is Kind.B and wanted(op):
            yield Op(op.stage, Kind.R, op.microbatch)
        yield op


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
