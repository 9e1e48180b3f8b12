"""Where the time of a step went and what was held, rank by rank; for simulated and for measured timelines alike."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from pipetrain.schedule.alive import OPENS_STASH, brings_set, places_freed, places_taken
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.kinds import COPY_LANES, FINISHING, OFFLOAD, PASS_SEQUENCES, RECOMPUTE, REDUCING, Direction
from pipetrain.schedule.messages import source_of
from pipetrain.schedule.op import Op
from pipetrain.schedule.schedule import Schedule

Curve = list[tuple[float, float]]  # (time, held from then on)


def sets_over_time(schedule: Schedule, events: Iterable[OpEvent]) -> Curve:
    """The number of sets alive after each change, with its time: a set comes with F (kept) or R and goes with B or W.

    In a stage with parts, each counts as its fraction of a set.
    """
    changes = []
    for event in events:
        parts = schedule.policy.num_parts(event.op.stage)
        if taken := places_taken(schedule, event.op):
            changes.append((event.start, taken / parts))
        elif freed := places_freed(schedule, event.op):
            changes.append((event.end, -freed / parts))
    counts = [(time, round(count, 9)) for time, count in _running(changes)]
    return [(time, int(count) if count.is_integer() else count) for time, count in counts]


def bytes_over_time(schedule: Schedule, events: Iterable[OpEvent], costs: Costs) -> Curve:
    """Bytes of sets; if a set is recomputed, from F on those of the stashed input and the outputs kept for R (which are part of the
    set). These stay on the device when the rest goes to host memory.

    Each part of a stage has an input, taken to be as large as that of the stage.
    """
    changes = []
    for event in events:
        op, stage = event.op, event.op.stage
        stash, whole = costs.input_bytes[stage], costs.set_bytes[stage]
        kept, share = costs.kept_bytes[stage] if costs.kept_bytes else 0.0, schedule.policy.share_of(stage, op.part)
        if op.kind in OPENS_STASH and stage >= schedule.first_backward:
            inputs = stash * schedule.policy.num_parts(stage) + kept
            changes.append((event.start, whole if brings_set(schedule, op) else inputs))
        elif places_taken(schedule, op):
            changes.append((event.start, (whole - kept) * share - stash))
        elif places_freed(schedule, op):
            left = stash + kept * share if op.kind is OFFLOAD else 0.0
            changes.append((event.end, left - whole * share))
    return _running(changes)


def _running(changes: Curve) -> Curve:
    """How many there are after each change, in the order of time; of one moment what goes comes first."""
    in_order = sorted(changes)
    return list(zip((time for time, _ in in_order), itertools.accumulate(change for _, change in in_order)))


Interval = tuple[float, float]
_WAITS = {Direction.FORWARD: "wait_activation_seconds", Direction.BACKWARD: "wait_gradient_seconds"}
_ACCOUNTS = ("handover_seconds", "host_seconds", "machine_seconds")  # what a rank's thread did between two ops
_BACKWARD = frozenset(kind for way in PASS_SEQUENCES[Direction.BACKWARD] for kind in way)


_Seconds = TypeVar("_Seconds", float, tuple[float | None, ...])


@dataclass(frozen=True, kw_only=True)
class Bubble(Generic[_Seconds]):
    """The idle seconds of a step by cause: of one rank, or of each.

    `fill` is the bubble before the rank's first op and `drain` that after its last. Between them a rank may wait for
    an activation or a gradient that has not arrived; of these waits `imbalance` is the part that no order could avoid,
    because the busiest rank of its replica has that much more work. Or it waits for a copy of a set to host memory or back. In the
    rest everything was there that the next op needs: for `handover` the rank's thread was still waiting for the message, for `host` it was on
    its way to the op, for `machine` it was ready and not run. `unexplained` is what is left.

    `reduce_exposed` is the rank's own adding up of gradients after the last op that computes on any rank of any replica: without it
    the step would have ended. What another rank of them adds up then is part of this rank's `drain`.
    """

    fill_seconds: _Seconds
    drain_seconds: _Seconds
    wait_activation_seconds: _Seconds
    wait_gradient_seconds: _Seconds
    wait_copy_seconds: _Seconds
    imbalance_seconds: _Seconds
    handover_seconds: _Seconds
    host_seconds: _Seconds
    machine_seconds: _Seconds
    unexplained_seconds: _Seconds
    reduce_exposed_seconds: _Seconds


CAUSES = tuple(field.name for field in fields(Bubble))


@dataclass(frozen=True, kw_only=True)
class RankBreakdown(Bubble[float]):
    """The step of one rank in seconds. Busy and the eleven kinds of bubble add up to the step, which is that of all replicas.

    `recompute_exposed` is the part of R's time in which no F, B, I or W ran although the next one had all its inputs (R
    not counted), `recompute_hidden` the rest. `peak_sets` counts the sets alive at once on the rank. `deferred_share` is what W
    has of the seconds of all backwards, be they whole or split; 0 without any.
    """

    rank: int
    busy_seconds: float
    recompute_hidden_seconds: float
    recompute_exposed_seconds: float
    peak_sets: float
    deferred_share: float

    @property
    def bubble_seconds(self) -> float:
        return math.fsum(getattr(self, cause) for cause in CAUSES)


def break_down(schedule: Schedule, timeline: Timeline) -> tuple[RankBreakdown, ...]:
    """One record per rank, in rank order."""
    (only,) = break_down_replicas(schedule, [timeline])
    return only


def break_down_replicas(schedule: Schedule, replicas: Sequence[Timeline]) -> tuple[tuple[RankBreakdown, ...], ...]:
    """For each replica one record per rank, counted as in its timeline. The step is that of all: none may go on before the last."""
    computed = max(timeline.last_op_end for timeline in replicas)
    step = (min(timeline.start for timeline in replicas), max(timeline.end for timeline in replicas))
    found = []
    for timeline in replicas:
        ranks = [timeline.of_rank(rank) for rank in range(timeline.num_ranks)]
        busy = [merged(_interval(event) for event in events if event.op.kind.computes) for events in ranks]
        most = max(map(length, busy), default=0.0)
        own = (_of_rank(schedule, rank, ranks[rank], busy[rank], step, most, computed) for rank in range(len(ranks)))
        found.append(tuple(own))
    return tuple(found)


def bubble_fraction(breakdown: Sequence[RankBreakdown]) -> float:
    """Bubble of all ranks over the time of all ranks; 0 for a step of no length."""
    bubble = sum(rank.bubble_seconds for rank in breakdown)
    total = bubble + sum(rank.busy_seconds for rank in breakdown)
    return bubble / total if total > 0 else 0.0


def _of_rank(
    schedule: Schedule,
    rank: int,
    events: Sequence[OpEvent],
    busy: Sequence[Interval],
    step: Interval,
    most: float,
    computed: float,
) -> RankBreakdown:
    """`most`: busy seconds of the busiest rank; `computed`: when the last op that computes had ended on all ranks."""
    first, last = (busy[0][0], busy[-1][1]) if busy else (step[1], step[1])
    idle = _idle_between(schedule, events, busy, first)
    waits = sum(idle[wait] for wait in _WAITS.values())
    imbalance = min(waits, most - length(busy))
    for wait in _WAITS.values():
        idle[wait] *= 1 - imbalance / waits if waits > 0 else 0.0
    recompute = length(merged(_interval(event) for event in events if event.op.kind is RECOMPUTE))
    exposed = length(exposed_intervals(schedule, events))
    backward = sum(event.end - event.start for event in events if event.op.kind in _BACKWARD)
    late = sum(event.end - event.start for event in events if event.op.kind in FINISHING)
    reduces = merged(_interval(event) for event in events if event.op.kind in REDUCING)
    reducing = length(clipped(reduces, (max(last, computed), step[1])))
    return RankBreakdown(
        rank=rank,
        busy_seconds=length(busy),
        fill_seconds=first - step[0],
        drain_seconds=step[1] - last - reducing,
        imbalance_seconds=imbalance,
        recompute_hidden_seconds=recompute - exposed,
        recompute_exposed_seconds=exposed,
        peak_sets=max((count for _, count in sets_over_time(schedule, events)), default=0),
        deferred_share=late / backward if backward > 0 else 0.0,
        reduce_exposed_seconds=reducing,
        **idle,
    )


def _idle_between(
    schedule: Schedule, events: Sequence[OpEvent], busy: Sequence[Interval], first: float
) -> dict[str, float]:
    """Idle seconds between the first and the last op, by the field of `Bubble`: waiting for an activation, for a gradient, for a copy; of the
    rest, those in which the message was handed over, the host ran, or was not run, and those of which nobody knows."""
    ends = {event.op: event.end for event in events}
    found = dict.fromkeys((*_WAITS.values(), "wait_copy_seconds", *_ACCOUNTS, "unexplained_seconds"), 0.0)
    accounts, before = dict.fromkeys(_ACCOUNTS, 0.0), first  # what the host did since the last op that is no R

    def idle_until(moment: float) -> float:
        nonlocal before
        since, before = before, max(before, moment)
        return _idle(busy, (since, before))

    for event in sorted((event for event in events if event.op.kind.computes), key=lambda event: event.start):
        own = (event.waited_seconds, event.ran_seconds, event.stalled_seconds)
        accounts = {name: accounts[name] + seconds for name, seconds in zip(_ACCOUNTS, own)}
        if event.op.kind is RECOMPUTE:
            continue
        missing = 0.0
        if (direction := event.op.kind.row.direction) is not None:  # W takes no tensor: what it needs is on its rank
            missing = idle_until(min(_ready(schedule, event.op, ends, before), event.start))
            found[_WAITS[direction]] += missing
        copied = [ends.get(one, before) for one in schedule.waits.get(event.op, ()) if one.kind.row.lane in COPY_LANES]
        found["wait_copy_seconds"] += idle_until(min(max(copied, default=before), event.start))
        left = idle_until(event.start)
        for name, seconds in accounts.items():
            if name == "handover_seconds":
                seconds = max(seconds - missing, 0.0)  # waited although the message was there
            taken = min(left, seconds)
            found[name], left = found[name] + taken, left - taken
        found["unexplained_seconds"] += left
        accounts, before = dict.fromkeys(_ACCOUNTS, 0.0), max(before, event.end)
    found["unexplained_seconds"] += idle_until(busy[-1][1]) if busy else 0.0
    return found


def exposed_intervals(schedule: Schedule, events: Iterable[OpEvent]) -> list[Interval]:
    """When the R of one rank was exposed; `events` are all of that rank's, messages included."""
    known = list(events)
    ends = {event.op: event.end for event in known}
    recompute = merged(_interval(event) for event in known if event.op.kind is RECOMPUTE)
    exposed: list[Interval] = []
    before = float("-inf")
    steps = (event for event in known if event.op.kind.computes and event.op.kind is not RECOMPUTE)
    for event in sorted(steps, key=lambda event: event.start):
        ready = _ready(schedule, event.op, ends, before)
        exposed += clipped(recompute, (max(before, ready), event.start))
        before = max(before, event.end)
    return exposed


def _ready(schedule: Schedule, op: Op, ends: Mapping[Op, float], default: float) -> float:
    """When `op` had its activation or gradient (its set does not count); of a part, what the part before it gave."""
    source = source_of(schedule, op)
    return default if source is None else ends.get(source, default)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as intervals in order that do not touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    return sum((end - start for start, end in intervals), 0.0)


def clipped(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """The parts of `window` that lie in the intervals, which are in order and do not touch."""
    if window[1] <= window[0]:
        return []
    first = bisect.bisect_right(intervals, window[0], key=lambda interval: interval[1])
    last = bisect.bisect_left(intervals, window[1], key=lambda interval: interval[0])
    return [(max(start, window[0]), min(end, window[1])) for start, end in intervals[first:last]]


def _idle(busy: Sequence[Interval], window: Interval) -> float:
    return max(0.0, window[1] - window[0] - length(clipped(busy, window)))


def _interval(event: OpEvent) -> Interval:
    return event.start, event.end
