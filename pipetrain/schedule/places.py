"""Chooses sets to keep in activation slots beyond the first: it simulates a few patterns. Moves R into earlier gaps.

GPipe, 2 slots                   1F1B with 3 in flight, 2 slots, one of them left to R
F0 F1 F2 F3 B0 B1 B2 B3          F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 ...
|___________|                    |________|  |____________|
   |___________|  then R2, R3          R1 here, then R2
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator

from pipetrain.schedule.alive import KEEPS_SET
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.graph import op_graph, run_order
from pipetrain.schedule.kinds import Direction
from pipetrain.schedule.messages import add_messages
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import Sets, add_recompute, decides_itself, kept_at_once
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.waits import add_waits


def kept_patterns(draft: Schedule) -> Iterator[Sets]:
    """The sets to keep, for each pattern for which there are slots. The first pattern keeps none; without a choice it is the only one."""
    yield frozenset()
    microbatches, policy = draft.num_microbatches, draft.policy
    stages = range(draft.first_backward, draft.num_stages)
    if decides_itself(draft) or not policy.keeps or policy.mode is Mode.NEVER or not stages:
        return
    places, parts = (max(of(stage) or 0 for stage in stages) for of in (policy.places_of, policy.num_parts))
    for for_recompute in range(min(places, _MOST_FOR_RECOMPUTE + 1)):
        kept = max(1, (places - for_recompute) // parts)
        patterns: list[Container[int]] = [range(start, microbatches) for start in (0, 1, 2, microbatches // 2)]
        patterns += [range(0, microbatches, period) for period in (2, 3)]
        patterns += [{i for i in range(microbatches) if i * kept % microbatches < kept}]  # evenly spread
        yield from (fill_places(draft, for_recompute, pattern) for pattern in patterns)
        yield fill_places(draft, for_recompute, range(microbatches), from_the_end=True)


_MOST_FOR_RECOMPUTE = 1  # slots that a pattern leaves to R alone: more of them bring R hardly earlier


def fill_places(
    draft: Schedule, for_recompute: int, wanted: Container[int], *, from_the_end: bool = False
) -> frozenset[tuple[int, int]]:
    """Keeps each wanted set for which its stage has a free activation slot. `from_the_end` takes microbatches in reverse, not in the order of F.

    Each stage leaves `for_recompute` of its slots to R at any time; a slot holds a set or a part of one. If that is none, kept sets may fill
    all slots, but each set that is not kept must still find a slot just before it is read.
    """
    kept: set[tuple[int, int]] = set()
    at_once = kept_at_once(draft)
    for stage in range(draft.first_backward, draft.num_stages):
        pool = _Places(draft, stage, for_recompute)
        for microbatch in sorted(i for one, i in at_once if one == stage):
            pool.keep(microbatch)
        order: Iterable[int] = reversed(pool.microbatches) if from_the_end else pool.microbatches
        kept |= {(stage, i) for i in order if i in wanted and (stage, i) not in at_once and pool.keep(i)}
    return frozenset(kept)


class _Places:
    """How many activation slots of one stage are taken while each of its ops runs, in the order of its compute lane.

    A recomputed set needs at least one slot from its first reader to its last op; its parts use it one after the other. A kept set
    needs a slot per part, from its F. An R can wait for a slot until just before the first reader, so no other need counts.
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
        """Keep a set if that leaves enough slots for the others. Returns whether it is kept."""
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


def has_gaps_for_r(schedule: Schedule) -> bool:
    """Whether this pass has anything to do: with one slot no R can come before the B in front of it has ended."""
    places = (schedule.policy.places_of(stage) or 0 for stage in range(schedule.num_stages))
    return schedule.policy.mode is Mode.EARLY and max(places) > 1


def into_gaps(schedule: Schedule, costs: Costs) -> Schedule:
    """`schedule` with each R where it would start in a lane of its own: where its rank waits and a slot is free.

        one slot      F0 F1 F2 R0 .  .  B0 R1 B1 R2 B2
        two slots     F0 F1 F2 R0 R1 .  B0 B1 R2 B2

    A simulated step with `recompute.mode=overlap` finds these positions. Messages and waits are those of `schedule`.
    """
    policy = dataclasses.replace(schedule.policy, mode=Mode.OVERLAP)
    beside = add_messages(add_recompute(dataclasses.replace(schedule, policy=policy)))
    beside = add_waits(beside, schedule.transport_ahead)
    graph = op_graph(beside)
    started = {event.op: event.start for event in simulate(beside, costs).events}
    compute: list[list[Op]] = [[] for _ in schedule.lanes]
    for place in run_order(graph, [started[op] for op in graph.ops]):
        if graph.ops[place].kind.computes:
            compute[graph.ranks[place]].append(graph.ops[place])
    return schedule.with_compute(compute)
