"""How much a stage may hold at once, whatever the timing: sets (for their B) and stashed microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.schedule import Schedule


@dataclass(frozen=True)
class SetPeak:
    """The most sets of one stage alive at once, how many of them at most recomputed, and an op at such a moment."""

    sets: int
    recomputed: int
    op: Op


def peak_sets(schedule: Schedule) -> tuple[SetPeak, ...]:
    """Per stage, the worst over all timings that the schedule allows.

    A kept set lives from the start of F to the end of B, a recomputed one from the start of R. The compute lane is a
    chain, so a moment is the number c of its ops that have ended while op c runs. The recompute lane may then have
    started each R whose waits lie in those c ops; at worst it has started them all.
    """
    peaks = [SetPeak(0, 0, Op(stage, Kind.F, 0)) for stage in range(schedule.num_stages)]
    for rank in range(schedule.num_ranks):
        kept = [0] * schedule.num_stages
        recomputed = [0] * schedule.num_stages
        for op, starts in _moments(schedule, rank):
            is_kept = (op.stage, op.microbatch) in schedule.kept
            counts = kept if is_kept else recomputed
            counts[op.stage] += 1 if starts else -1
            total, old = kept[op.stage] + recomputed[op.stage], peaks[op.stage]
            if total > old.sets or recomputed[op.stage] > old.recomputed:
                now = recomputed[op.stage]
                peaks[op.stage] = SetPeak(max(total, old.sets), max(now, old.recomputed), op)
    return tuple(peaks)


def _moments(schedule: Schedule, rank: int) -> list[tuple[Op, bool]]:
    """Where sets of a rank come (True) and go (False), by the number of compute ops that have ended; goings first."""
    compute = schedule.lane(rank, Lane.COMPUTE)
    place = {op: number for number, op in enumerate(compute)}
    moments: list[tuple[int, bool, Op]] = []
    for number, op in enumerate(compute):
        is_kept = (op.stage, op.microbatch) in schedule.kept
        if op.kind is Kind.R or (op.kind is Kind.F and is_kept):
            moments.append((number, True, op))
        elif op.kind is Kind.B:
            moments.append((number + 1, False, op))
    unlocked = 0
    for op in schedule.lane(rank, Lane.RECOMPUTE):
        ended = (place[other] + 1 for other in schedule.waits.get(op, ()) if other in place)
        unlocked = max(unlocked, *ended, 0)
        moments.append((unlocked, True, op))
    moments.sort(key=lambda moment: moment[:2])
    return [(op, starts) for _, starts, op in moments]


def peak_stash(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches between the start of F and the end of B."""
    peaks, held = [0] * schedule.num_stages, [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for op in schedule.lane(rank, Lane.COMPUTE):
            if op.stage >= schedule.first_backward:
                held[op.stage] += {Kind.F: 1, Kind.B: -1}.get(op.kind, 0)
                peaks[op.stage] = max(peaks[op.stage], held[op.stage])
    return tuple(peaks)
