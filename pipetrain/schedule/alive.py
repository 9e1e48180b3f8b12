"""What opens and closes a set or a stash, and how much a stage may hold at once, whatever the timing.

The bounds hold for every order of starts and ends that the waits and queues allow. The launch order of a host is such an order. So they
also hold if a host launches a device's ops far ahead, and allocates and frees memory in launch order.

An output that waits for its SEND counts neither as a set nor as stash. `launches.py` bounds the number of such outputs, except in GPipe
whose last stage alternates F and B.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.schedule.kinds import RECOMPUTE, Direction, Holding, kinds_where
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule

OPENS_STASH = kinds_where(lambda row: Holding.STASH in row.allocates)
CLOSES_STASH = kinds_where(lambda row: Holding.STASH in row.frees)
KEEPS_SET = kinds_where(lambda row: Holding.KEPT_SET in row.allocates)
ENDS_SET = kinds_where(lambda row: Holding.KEPT_SET in row.frees)


def brings_set(schedule: Schedule, op: Op) -> bool:
    """Whether `op` makes a set: an R does, and an F whose set is kept."""
    return op.kind is RECOMPUTE or (op.kind in KEEPS_SET and (op.stage, op.microbatch) in schedule.kept)


def ends_stash(op: Op) -> bool:
    """Whether the stage holds nothing of the microbatch once `op` has ended. If B runs in parts, the B of part 0 is the last."""
    return op.kind in CLOSES_STASH and not op.part


def places_taken(schedule: Schedule, op: Op) -> int:
    """How many activation slots `op` takes at its start: one for a part; for a whole set, as many as its stage has parts."""
    return _places(schedule, op) if brings_set(schedule, op) else 0


def places_freed(schedule: Schedule, op: Op) -> int:
    """How many activation slots `op` frees at its end."""
    return _places(schedule, op) if op.kind in ENDS_SET else 0


def _places(schedule: Schedule, op: Op) -> int:
    return schedule.policy.num_parts(op.stage) if op.part is None else 1


def as_sets(schedule: Schedule, stage: int, places: int) -> float:
    """Converts a number of activation slots of `stage` into sets; a whole number of sets is an int."""
    sets, rest = divmod(places, schedule.policy.num_parts(stage))
    return sets if not rest else places / schedule.policy.num_parts(stage)


@dataclass(frozen=True)
class SetPeak:
    """The largest number of sets of one stage that are alive at once, and their activation slots (`places`). `op` opens the last of them."""

    sets: float
    places: int
    op: Op


def peak_sets(schedule: Schedule) -> tuple[SetPeak, ...]:
    """Per stage, the worst over all timings that the schedule allows.

    A kept set lives from the start of its F to the end of its B (or W), a recomputed set from the start of its R. The ops of the
    compute lane run one after the other, so a number c stands for a moment: c of them have ended. By then the recompute lane
    may have started each R whose waits are among these c ops. The worst case is that it has started all of them.
    """
    peaks = [SetPeak(0, 0, schedule.way(Direction.FORWARD, stage, 0)[0]) for stage in range(schedule.num_stages)]
    for rank in range(schedule.num_ranks):
        alive = [0] * schedule.num_stages
        for op, starts in _moments(schedule, rank):
            alive[op.stage] += places_taken(schedule, op) if starts else -places_freed(schedule, op)
            if alive[op.stage] > peaks[op.stage].places:
                peaks[op.stage] = SetPeak(as_sets(schedule, op.stage, alive[op.stage]), alive[op.stage], op)
    return tuple(peaks)


def _moments(schedule: Schedule, rank: int) -> list[tuple[Op, bool]]:
    """The ops of a rank that begin (True) or end (False) a set, by the number of compute ops that have ended; at one number, ends first."""
    compute = schedule.lane(rank, Lane.COMPUTE)
    place = {op: number for number, op in enumerate(compute)}
    moments: list[tuple[int, bool, Op]] = []
    for number, op in enumerate(compute):
        if brings_set(schedule, op):
            moments.append((number, True, op))
        elif op.kind in ENDS_SET:
            moments.append((number + 1, False, op))
    unlocked = 0
    for op in schedule.lane(rank, Lane.RECOMPUTE):
        ended = (place[other] + 1 for other in schedule.waits.get(op, ()) if other in place)
        unlocked = max(unlocked, *ended, 0)
        moments.append((unlocked, True, op))
    moments.sort(key=lambda moment: moment[:2])
    return [(op, starts) for _, starts, op in moments]


def peak_stash(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches between the start of F and the end of B, or W."""
    peaks, held = [0] * schedule.num_stages, [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for op in schedule.lane(rank, Lane.COMPUTE):
            if op.stage >= schedule.first_backward:
                held[op.stage] += (op.kind in OPENS_STASH) - ends_stash(op)
                peaks[op.stage] = max(peaks[op.stage], held[op.stage])
    return tuple(peaks)


def idle_places(schedule: Schedule) -> str | None:
    """A sentence for the user if a stage has more activation slots than sets to hold; None: no stage has.

    One number for all stages is too large only if it is too large for each of them.
    """
    policy, held = schedule.policy, peak_stash(schedule)
    if policy.mode is Mode.NEVER or policy.sets is None or max(held, default=0) == 0:
        return None
    if not isinstance(policy.sets, tuple):
        too_many, who, most = policy.sets > max(held), "no stage has", max(held)
    else:
        stage = next((s for s, (size, count) in enumerate(zip(policy.sets, held)) if size > count > 0), None)
        too_many, who, most = stage is not None, f"stage {stage} never has", held[stage or 0]
    if not too_many:
        return None
    sets = list(policy.sets) if isinstance(policy.sets, tuple) else policy.sets
    effect = (
        "with as many slots nothing is recomputed there, as with recompute.mode=never"
        if policy.keeps
        else ("more slots change nothing")
    )
    return f"recompute.sets={sets}: {who} more than {most} microbatches between F and B; {effect}"
