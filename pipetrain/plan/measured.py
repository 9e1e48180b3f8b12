"""What ops cost, from what they took in the steps before: the costs that a step is predicted with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import REDUCING, Direction
from pipetrain.schedule.op import Op
from pipetrain.timeline.residuals import is_of_replicas, op_seconds

MEASURED_STEPS = range(2, 5)  # step 1 warms up: shapes are announced, memory is taken
FIRST_COMPARED_STEP = 5  # costs are never fitted to the steps that they are compared with


def _taken(replicas: Sequence[Timeline]) -> Iterator[tuple[Op, float]]:
    """The seconds of each op of a step on each replica; of one in parts, of all of them."""
    with_replicas = {event.op.stage for timeline in replicas for event in timeline.events if is_of_replicas(event.op)}
    for timeline in replicas:
        taken: dict[Op, float] = defaultdict(float)
        for op, seconds in op_seconds(timeline, beside=replicas).items():
            taken[replace(op, part=None) if op.part is not None else op] += seconds
        for op, seconds in taken.items():
            if op.kind not in REDUCING or is_of_replicas(op) or op.stage not in with_replicas:
                yield op, seconds


def measure_costs(num_stages: int, steps: Iterable[Sequence[Timeline]]) -> Costs:
    """The median time of each kind of op per stage, and of a hop per edge and direction, over all microbatches, replicas and steps.

    Of each step the timelines of its replicas. A stage without R is given its F's time: its schedule has no R to charge it for. A
    backward that was only ever split is charged as its two halves, and one that never was, as half and half. A stage that adds up no
    gradients has no time for it; one that does with other replicas is charged for that, all its buckets together.
    """
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for op, seconds in (found for replicas in steps for found in _taken(replicas)):
        row = op.kind.row
        if row.cost is not None:
            place = op.stage if row.direction is not Direction.FORWARD or op.kind.computes else op.stage - 1
            spent[row.cost, place].append(seconds)  # a hop is measured where it is received: its edge

    def median(cost: str, places: int, instead: Sequence[float] = ()) -> tuple[float, ...]:
        otherwise = instead or (0.0,) * places
        return tuple(statistics.median(spent.get((cost, place), [otherwise[place]])) for place in range(places))

    def halves(cost: str) -> tuple[float, ...]:
        return median(cost, num_stages, tuple(one / 2 for one in whole)) if any(key == cost for key, _ in spent) else ()

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
        reduce=median("reduce", num_stages) if any(key == "reduce" for key, _ in spent) else (),
    )
