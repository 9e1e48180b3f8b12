"""What ops cost, from what they took in the steps before: the costs that a step is predicted with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from pipetrain.plan.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.op import Kind, Op

MEASURED_STEPS = range(2, 5)  # step 1 warms up: shapes are announced, memory is taken
FIRST_COMPARED_STEP = 5  # costs are never fitted to the steps that they are compared with


def measure_costs(num_stages: int, timelines: Iterable[Timeline]) -> Costs:
    """The median time of F, B and R per stage and of a hop per edge and direction, over all microbatches and steps.

    A hop lasts from the moment when both ends are ready (sent and posted) to the arrival. A stage without R is given
    its F's time: its schedule has no R to charge it for.
    """
    spent: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        by_op = {event.op: event for event in timeline.events}
        for event in timeline.events:
            if event.op.kind.computes:
                spent[event.op.kind, event.op.stage].append(event.end - event.start)
            elif (sender := _sender(event.op)) is not None and (sent := by_op.get(sender)) is not None:
                spent[event.op.kind, event.op.stage].append(_hop(sent, event))

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


def _sender(op: Op) -> Op | None:
    """The SEND that ends in the RECV `op`; None for other kinds."""
    if op.kind is Kind.RECV_F:
        return Op(op.stage - 1, Kind.SEND_F, op.microbatch)
    if op.kind is Kind.RECV_B:
        return Op(op.stage + 1, Kind.SEND_B, op.microbatch)
    return None


def _hop(sent: OpEvent, received: OpEvent) -> float:
    # clocks of two ranks agree to some microseconds only, so a fast hop may seem to end before it began
    return max(received.end - max(sent.start, received.start), 0.0)
