"""Problems for the search of an order: the table of `orders.json`, and random ones. Loads no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from random_schedules import costs_of

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec

ORDERS = Path(__file__).with_name("orders.json")


@dataclass(frozen=True)
class Cell:
    """Equal stages (F 1, B 2, R 1, I 1, W 1) with so many places each; `goal` is the step to reach, in those units.

    `is_exact`: no order is faster. Others are to be reached within 2 %.
    """

    stages: int
    microbatches: int
    hop: float
    places: int
    goal: float
    is_exact: bool = False
    split: bool = False

    def __str__(self) -> str:
        halves = ", split" if self.split else ""
        return f"{self.stages} stages, {self.microbatches} microbatches, hop {self.hop:g}, {self.places} places{halves}"

    @property
    def costs(self) -> Costs:
        return Costs.spread(self.stages, hop=self.hop)

    @property
    def spec(self) -> ScheduleSpec:
        """With the order of `orders.json`, where that has one."""
        ranks, policy = tuple(range(self.stages)), RecomputePolicy(sets=self.places)
        spec = ScheduleSpec(AUTO, ranks, self.microbatches, policy, costs=self.costs, split_backward=self.split)
        text = json.loads(ORDERS.read_text()).get(str(self))
        return spec if text is None else replace(spec, order=order_of_csv(text, str(self), spec.shape))

    @property
    def unsolved(self) -> ScheduleSpec:
        """Without an order."""
        return replace(self.spec, order=None)


def cells() -> list[Cell]:
    """Time against memory: what is known to be reachable."""
    exact, near = True, False
    rows = {
        (2, 8, 0): [(30, exact), (27, exact)],
        (4, 4, 0): [(21, exact)],
        (4, 8, 0): [(36, exact), (33, exact), (33, exact)],
        (4, 16, 0): [(66, exact), (61, exact), (57, exact)],
        (4, 32, 0): [(131, near), (121, near), (114, near)],
        (8, 8, 0): [(48, exact), (45, exact), (45, exact)],
        (8, 16, 0): [(78, exact), (73, exact), (69, exact)],
        (8, 32, 0): [(142, near), (133, near), (131, near)],
        (4, 16, 0.5): [(69, exact), (63, exact), (61, exact)],
        (8, 16, 0.5): [(85, exact), (79, exact), (77, exact)],
    }
    found = [
        Cell(*row, places, goal, is_exact)
        for row, goals in rows.items()
        for places, (goal, is_exact) in enumerate(goals, start=1)
    ]
    halves = [Cell(8, 8, 0, 2, 38, split=True), Cell(4, 16, 0, 1, 65, split=True)]
    frontier = [(1, 73), (2, 66), (3, 64), (4, 62), (6, 57)]  # of docs/SCHEDULES.md
    return [*found, *halves, *(Cell(8, 16, 0, places, goal, split=True) for places, goal in frontier)]


@st.composite
def specs(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 8) -> ScheduleSpec:
    """Any problem: costs of its own for each stage and edge, places and stash, backward whole or split, every mode."""
    stages, microbatches = draw(st.integers(1, max_stages)), draw(st.integers(1, max_microbatches))
    numbers = st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    mode, sets, stash = draw(st.sampled_from(Mode)), draw(numbers), draw(st.one_of(st.none(), numbers))
    return ScheduleSpec(
        AUTO,
        tuple(draw(st.permutations(range(stages)))),
        microbatches,
        RecomputePolicy(mode, sets=sets, stash=stash),
        costs=draw(costs_of(stages)),
        first_backward=draw(st.one_of(st.just(0), st.integers(0, stages))),
        transport_ahead=draw(st.integers(0, 3)),
        split_backward=draw(st.booleans()),
    )
