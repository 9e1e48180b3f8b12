"""What ops cost, from what they took in the steps before: the costs that a step is predicted with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.op import Kind
from pipetrain.timeline.residuals import op_seconds

MEASURED_STEPS = range(2, 5)  # step 1 warms up: shapes are announced, memory is taken
FIRST_COMPARED_STEP = 5  # costs are never fitted to the steps that they are compared with


def measure_costs(num_stages: int, timelines: Iterable[Timeline]) -> Costs:
    """The median time of F, B and R per stage and of a hop per edge and direction, over all microbatches and steps.

    A stage without R is given its F's time: its schedule has no R to charge it for.
    """
    spent: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for op, seconds in op_seconds(timeline).items():
            spent[op.kind, op.stage].append(seconds)

    def median(kind: Kind, stages: Iterable[int]) -> tuple[float, ...]:
        return tuple(statistics.median(spent.get((kind, stage), [0.0])) for stage in stages)

    forward = median(Kind.F, range(num_stages))
    return Costs(
        forward=forward,
        backward=median(Kind.B, range(num_stages)),
        recompute=tuple(statistics.median(spent.get((Kind.R, stage), [forward[stage]])) for stage in range(num_stages)),
        hop_forward=median(Kind.RECV_F, range(1, num_stages)),
        hop_backward=median(Kind.RECV_B, range(num_stages - 1)),
    )
