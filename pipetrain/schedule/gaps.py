"""The pass of `recompute.mode=early` with several places: an R goes forward into the first gap in which it finds a place.

one place     F0 F1 F2 R0 .  .  B0 R1 B1 R2 B2
two places    F0 F1 F2 R0 R1 .  B0 B1 R2 B2
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from pipetrain.schedule.alive import places_freed, places_taken
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import RECOMPUTE
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

_MOMENT = 1e-9  # of the step: a shorter wait is none


def has_gaps_for_r(schedule: Schedule) -> bool:
    """Whether this pass has anything to do: with one place no R can come before the B in front of it has ended."""
    places = (schedule.policy.places_of(stage) or 0 for stage in range(schedule.num_stages))
    return schedule.policy.mode is Mode.EARLY and max(places) > 1


def into_gaps(schedule: Schedule, costs: Costs) -> Schedule:
    """The compute lanes of `schedule` with each R before the first op for which its rank waits while a place is free.

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
        compute = _Lane(schedule, rank, [max(0.0, gaps[op] - shortest) for op in of_rank[Lane.COMPUTE]])
        lanes.append({**of_rank, Lane.COMPUTE: compute.with_r_in_gaps(costs)})
    return dataclasses.replace(schedule, lanes=tuple(lanes))


class _Lane:
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
