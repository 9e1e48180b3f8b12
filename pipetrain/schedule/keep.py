"""Which sets to keep, where the policy keeps some: a few patterns, compared by simulating them.

GPipe, 1 kept                    1F1B with 3 in flight, 1 kept: a freed place is used again
F0 F1 F2 F3 B0 B1 B2 B3          F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 ...
|___________|  (or F3 to B3)     |________|  |____________|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipetrain.schedule.alive import ENDS_SET, KEEPS_SET
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.op import Lane
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import Sets, decides_itself
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

Wanted = Callable[[int], bool]  # whether a pattern would keep microbatch i


def with_best_kept(draft: Schedule, costs: Costs, lower: Callable[[Sets], Schedule]) -> Schedule:
    """The fastest of `lower(kept)` over the patterns that fit into `keep` places; of equal ones the first."""
    policy = draft.policy
    if (
        decides_itself(draft)
        or policy.keep == 0
        or policy.mode is Mode.NEVER
        or draft.first_backward == draft.num_stages
    ):
        return lower(frozenset())
    candidates = [lower(kept) for kept in dict.fromkeys(_patterns(draft, policy.keep))]
    return min(candidates, key=lambda schedule: simulate(schedule, costs).step_seconds)


def _patterns(draft: Schedule, places: int) -> Iterator[frozenset[tuple[int, int]]]:
    microbatches = draft.num_microbatches
    for start in (0, 1, 2, microbatches // 2):
        yield fill_places(draft, places, lambda i, start=start: i >= start)  # type: ignore[misc]
    for period in (2, 3):
        yield fill_places(draft, places, lambda i, period=period: i % period == 0)  # type: ignore[misc]
    yield fill_places(draft, places, lambda i: i * places % microbatches < places)  # evenly spread
    yield fill_places(draft, places, lambda _: True, from_the_end=True)


def fill_places(
    draft: Schedule, places: int, wanted: Wanted, *, from_the_end: bool = False
) -> frozenset[tuple[int, int]]:
    """Keeps each wanted set that finds one of its stage's places free, in the order of F or, from the end, of B (or W)."""
    kept = set()
    for rank in range(draft.num_ranks):
        compute = draft.lane(rank, Lane.COMPUTE)
        opens, closes = (ENDS_SET, KEEPS_SET) if from_the_end else (KEEPS_SET, ENDS_SET)
        alive: dict[int, set[int]] = {stage: set() for stage in range(draft.first_backward, draft.num_stages)}
        for op in reversed(compute) if from_the_end else compute:
            microbatch = op.microbatch or 0
            if op.stage not in alive:
                continue
            if op.kind in opens and len(alive[op.stage]) < places and wanted(microbatch):
                alive[op.stage].add(microbatch)
                kept.add((op.stage, microbatch))
            elif op.kind in closes:
                alive[op.stage].discard(microbatch)
    return frozenset(kept)
