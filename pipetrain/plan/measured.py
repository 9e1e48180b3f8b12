"""What ops cost, from what they took in the steps before: the costs that a step is predicted with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import REDUCING, Direction
from pipetrain.schedule.op import Op
from pipetrain.timeline.residuals import op_seconds

MEASURED_STEPS = range(2, 5)  # step 1 warms up: shapes are announced, memory is taken
FIRST_COMPARED_STEP = 5  # costs are never fitted to the steps that they are compared with


def measure_costs(num_stages: int, steps: Iterable[Sequence[Timeline]], *, replica: int | None = None) -> Costs:
    """The median time of each kind of op per stage, and of a hop per edge and direction, over all microbatches, steps, and
    replicas (or the ops of one `replica` alone).

    Of each step the timelines of its replicas. A stage without R is given its F's time: its schedule has no R to charge it for. A
    backward that was only ever split is charged as its two halves, and one that never was, as half and half. A stage that adds up no
    gradients has no time for it; one that does with the other replicas takes all its buckets together.
    """
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for replicas in steps:
        for timeline in replicas if replica is None else replicas[replica : replica + 1]:
            taken: dict[Op, float] = defaultdict(float)  # of an op in parts, all of them
            for op, seconds in op_seconds(timeline, beside=replicas).items():
                taken[replace(op, part=None) if op.part is not None else op] += seconds
            for op, seconds in taken.items():
                row = op.kind.row
                if row.cost is not None:
                    place = op.stage if row.direction is not Direction.FORWARD or op.kind.computes else op.stage - 1
                    # A hop is measured where it is received: its edge.
                    spent["reduce_shared" if op.kind in REDUCING and op.peer is not None else row.cost, place].append(
                        seconds
                    )

    def median(cost: str, places: int, instead: Sequence[float] = ()) -> tuple[float, ...]:
        otherwise = instead or (0.0,) * places
        return tuple(statistics.median(spent.get((cost, place), [otherwise[place]])) for place in range(places))

    def halves(cost: str) -> tuple[float, ...]:
        return median(cost, num_stages, tuple(one / 2 for one in whole)) if any(key == cost for key, _ in spent) else ()

    def where_spent(cost: str) -> tuple[float, ...]:
        return median(cost, num_stages) if any(key == cost for key, _ in spent) else ()

    forward = median("forward", num_stages)
    split = [sum(pair) for pair in zip(median("input_gradient", num_stages), median("weight_gradient", num_stages))]
    whole = median("backward", num_stages, split)
    return Costs(
        forward=forward,
        backward=whole,
        recompute=median("recompute", num_stages, forward),
        hop_forward=median("hop_forward", num_stages - 1),
        hop_backward=median("hop_backward", num_stages - 1),
        input_gradient=halves("input_gradient"),
        weight_gradient=halves("weight_gradient"),
        reduce=where_spent("reduce"),
        reduce_shared=where_spent("reduce_shared"),
    )
