"""Places beyond the first: which sets to keep in them, by a few patterns compared in simulation, and R into earlier gaps.

GPipe, 2 places                  1F1B with 3 in flight, 2 places, one of them left to R
F0 F1 F2 F3 B0 B1 B2 B3          F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 ...
|___________|                    |________|  |____________|
   |___________|  then R2, R3          R1 here, then R2
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from pipetrain.schedule.alive import KEEPS_SET, places_freed, places_taken
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import RECOMPUTE, Direction
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import Sets, decides_itself, kept_at_once
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

Wanted = Callable[[int], bool]  # whether a pattern would keep microbatch i


def with_best_kept(draft: Schedule, costs: Costs, lower: Callable[[Sets], Schedule]) -> Schedule:
    """The fastest of `lower(kept)` over the patterns for which there are places; of equal ones the first."""
    policy = draft.policy
    if (
        decides_itself(draft)
        or not policy.keeps
        or policy.mode is Mode.NEVER
        or draft.first_backward == draft.num_stages
    ):
        return lower(frozenset())
    candidates = [lower(kept) for kept in dict.fromkeys(_patterns(draft))]
    return min(candidates, key=lambda schedule: simulate(schedule, costs).step_seconds)


def _patterns(draft: Schedule) -> Iterator[frozenset[tuple[int, int]]]:
    yield frozenset()
    microbatches, policy = draft.num_microbatches, draft.policy
    stages = range(draft.first_backward, draft.num_stages)
    places, parts = (max(of(stage) or 0 for stage in stages) for of in (policy.places_of, policy.num_parts))
    for for_recompute in range(min(places, _MOST_FOR_RECOMPUTE + 1)):
        kept = max(1, (places - for_recompute) // parts)
        for start in (0, 1, 2, microbatches // 2):
            yield fill_places(draft, for_recompute, lambda i, start=start: i >= start)  # type: ignore[misc]
        for period in (2, 3):
            yield fill_places(draft, for_recompute, lambda i, period=period: i % period == 0)  # type: ignore[misc]
        # evenly spread
        yield fill_places(draft, for_recompute, lambda i, kept=kept: i * kept % microbatches < kept)  # type: ignore[misc]
        yield fill_places(draft, for_recompute, lambda _: True, from_the_end=True)


_MOST_FOR_RECOMPUTE = 1  # places that a pattern leaves to R alone: more of them bring R hardly earlier


def fill_places(
    draft: Schedule, for_recompute: int, wanted: Wanted, *, from_the_end: bool = False
) -> frozenset[tuple[int, int]]:
    """Keeps each wanted set for which its stage has a place, in the order of F or, from the end, against it.

    Each stage leaves `for_recompute` of its places, each for a set or a part of one, to R at any time. All of them may be filled (0) where each set that is not kept
    still finds one just before it is read.
    """
    kept: set[tuple[int, int]] = set()
    at_once = kept_at_once(draft)
    for stage in range(draft.first_backward, draft.num_stages):
        pool = _Places(draft, stage, for_recompute)
        for microbatch in sorted(i for one, i in at_once if one == stage):
            pool.keep(microbatch)
        order: Iterable[int] = reversed(pool.microbatches) if from_the_end else pool.microbatches
        kept |= {(stage, i) for i in order if wanted(i) and (stage, i) not in at_once and pool.keep(i)}
    return frozenset(kept)


class _Places:
    """What lies in the places of one stage while each of its ops runs, in the order of its compute lane.

    A set that is not kept needs a place, for one part after the other, from the op that reads it first to that which ends it at
    least; a kept one needs as many as it has parts, from its F. An R waits until a place is free, so that these needs are all there are.
    """

    def __init__(self, draft: Schedule, stage: int, for_recompute: int) -> None:
        own = [op for op in draft.lane(draft.stage_ranks[stage], Lane.COMPUTE) if op.stage == stage]
        number = {op: place for place, op in enumerate(own)}
        size = draft.policy.places_of(stage)
        assert size is not None, "recompute.mode=never keeps all sets"
        self._size = size
        self._per_set = draft.policy.num_parts(stage)
        self._most_kept = size - for_recompute
        self._needed = [0] * len(own)
        self._kept = [0] * len(own)
        self._lives: dict[
            int, tuple[int, int, int]
        ] = {}  # of each microbatch the places of F, first reader and last op
        for op in own:
            if op.kind in KEEPS_SET:
                way = draft.way(Direction.BACKWARD, stage, op.microbatch)
                read, end = number.get(way[0], len(own)), number.get(way[-1], len(own) - 1)
                self._lives[op.microbatch or 0] = (number[op], read, end)
                for place in range(read, end + 1):
                    self._needed[place] += 1
        self.microbatches = list(self._lives)

    def keep(self, microbatch: int) -> bool:
        """Keeps a set if that leaves room for all others; whether it does."""
        start, read, end = self._lives[microbatch]
        before, then = self._per_set, self._per_set - 1  # more than an R that is as late as can be
        if max(self._needed[start:read], default=0) + before > self._size:
            return False
        if then and max(self._needed[read : end + 1], default=0) + then > self._size:
            return False
        if max(self._kept[start : end + 1], default=0) + self._per_set > self._most_kept:
            return False
        for place in range(start, end + 1):
            self._needed[place] += before if place < read else then
            self._kept[place] += self._per_set
        return True


# R into gaps (recompute.mode=early) -------------------------------------------------------------------------------------------

_MOMENT = 1e-9  # of the step: a shorter wait is none


def has_gaps_for_r(schedule: Schedule) -> bool:
    """Whether this pass has anything to do: with one place no R can come before the B in front of it has ended."""
    places = (schedule.policy.places_of(stage) or 0 for stage in range(schedule.num_stages))
    return schedule.policy.mode is Mode.EARLY and max(places) > 1


def into_gaps(schedule: Schedule, costs: Costs) -> Schedule:
    """The compute lanes of `schedule` with each R before the first op for which its rank waits while a place is free.

        one place     F0 F1 F2 R0 .  .  B0 R1 B1 R2 B2
        two places    F0 F1 F2 R0 R1 .  B0 B1 R2 B2

    A gap is a wait of the simulated step, and has room for R as long as it is not filled. Messages and waits are those of before.
    """
    timeline = simulate(schedule, costs)
    shortest = _MOMENT * timeline.step_seconds
    lanes = []
    for rank, of_rank in enumerate(schedule.lanes):
        gaps, before = {}, 0.0
        for event in timeline.of_rank(rank):
            if event.lane is Lane.COMPUTE:
                gaps[event.op] = event.start - before
                before = event.end
        compute = _GapLane(schedule, rank, [max(0.0, gaps[op] - shortest) for op in of_rank[Lane.COMPUTE]])
        lanes.append({**of_rank, Lane.COMPUTE: compute.with_r_in_gaps(costs)})
    return dataclasses.replace(schedule, lanes=tuple(lanes))


class _GapLane:
    """One compute lane: its ops, the wait before each, and how many places of a stage are taken while each op runs."""

    def __init__(self, schedule: Schedule, rank: int, gaps: list[float]) -> None:
        self._ops = schedule.lane(rank, Lane.COMPUTE)
        self._gaps = gaps
        self._policy = schedule.policy
        self._alive: defaultdict[int, list[int]] = defaultdict(list)
        stages, now = sorted({op.stage for op in self._ops}), defaultdict[int, int](int)
        for op in self._ops:
            now[op.stage] += places_taken(schedule, op)
            for stage in stages:
                self._alive[stage].append(now[stage])
            now[op.stage] -= places_freed(schedule, op)

    def with_r_in_gaps(self, costs: Costs) -> tuple[Op, ...]:
        """The ops, each R before the first op with a wait that has room for it."""
        seconds, share_of = costs.of(RECOMPUTE), self._policy.share_of
        before: defaultdict[int, list[Op]] = defaultdict(list)  # what moves to before the op at a place of the lane
        staying = set()
        for place, op in enumerate(self._ops):
            gap = self._gap_for(place, op) if op.kind is RECOMPUTE else None
            if gap is None:
                staying.add(place)
            else:
                before[gap].append(op)
                self._gaps[gap] -= seconds[op.stage] * share_of(op.stage, op.part)
        return tuple(
            op for place, own in enumerate(self._ops) for op in (*before[place], *((own,) if place in staying else ()))
        )

    def _gap_for(self, place: int, op: Op) -> int | None:
        """The first place to which R can go; all from there on then has one place less."""
        read = Op(op.stage, op.kind.row.reads[0], op.microbatch)
        alive, size, first = self._alive[op.stage], self._policy.places_of(op.stage), None
        for earlier in range(place - 1, -1, -1):
            if self._ops[earlier] == read or (size is not None and alive[earlier] >= size):
                break
            first = earlier if self._gaps[earlier] > 0 else first
        for taken in range(place if first is None else first, place):
            alive[taken] += 1
        return first
