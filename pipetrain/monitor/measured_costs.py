"""What ops took: costs to predict a step with, from the steps before."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import COPY_LANES, REDUCING, Direction
from pipetrain.schedule.messages import partner_of
from pipetrain.schedule.op import Lane, Op

MEASURED_STEPS = range(2, 5)  # step 1 warms up: shapes are announced, memory is taken
FIRST_COMPARED_STEP = 5  # costs are never fitted to the steps that they are compared with


def op_seconds(timeline: Timeline, *, beside: Iterable[Timeline] = ()) -> dict[Op, float]:
    """Seconds of each op that computes, of each copy of a set, of each hop under its RECV, and of each REDUCE_GRAD.

    A hop lasts from when both ends are ready (sent and posted) to the arrival, and a REDUCE_GRAD from when all its ranks are ready to the
    sum: those of two stages, or of one stage in all replicas, whose timelines are `beside`. On a rank, one over the replicas is charged
    from the end of the one before, as they share the link. Where the other end left no event, there is no entry.
    """
    by_op = {event.op: event for event in timeline.events}
    whole: dict[Op, float] = {}  # when the gradients of each bucket were whole in the last replica
    for one in (timeline, *beside):
        for event in one.events:
            if event.op.is_replica_allreduce:
                whole[event.op] = max(event.start, whole.get(event.op, event.start))
    seconds: dict[Op, float] = {}
    ended: dict[int, float] = {}  # per rank, the sum before
    for event in timeline.events:
        if event.op.kind.computes or event.lane in COPY_LANES:
            seconds[event.op] = event.end - event.start
        elif event.op.is_replica_allreduce:
            begin = max(whole[event.op], ended.get(event.rank, float("-inf")))
            ended[event.rank] = event.end
            seconds[event.op] = max(event.end - begin, 0.0)
        elif event.lane in (Lane.RECV, Lane.REDUCE) and (other := by_op.get(partner_of(event.op))) is not None:
            # clocks of two ranks agree to some microseconds only, so a fast hop may seem to end before it began
            seconds[event.op] = max(event.end - max(other.start, event.start), 0.0)
    return seconds


def measure_costs(num_stages: int, steps: Iterable[Sequence[Timeline]], *, replica: int | None = None) -> Costs:
    """The median time of each kind of op per stage, and of a hop per edge and direction, over all microbatches, steps, and
    replicas (or the ops of one `replica` alone).

    Of each step the timelines of its replicas. A stage without R is given its F's time: its schedule has no R to charge it for. A
    backward that was only ever split is charged as its two halves, and one that never was, as half and half. If any stage copies sets,
    a copy on one that copies none takes its F's time. A stage that adds up no gradients has no time for it; one that does with the
    other replicas takes all its buckets together.
    """
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for replicas in steps:
        for timeline in replicas if replica is None else replicas[replica : replica + 1]:
            taken: dict[Op, float] = defaultdict(float)  # of an op in parts, all of them
            for op, seconds in op_seconds(timeline, beside=replicas).items():
                taken[op._replace(part=None)] += seconds
            for op, seconds in taken.items():
                row, is_hop = op.kind.row, not op.kind.computes and op.kind.row.direction is Direction.FORWARD
                cost = "reduce_shared" if op.kind in REDUCING and op.peer is not None else row.cost
                if cost is not None:
                    spent[cost, op.stage - is_hop].append(seconds)  # of a hop, measured at its receive: the edge

    def median(cost: str, places: int, instead: Sequence[float] = ()) -> tuple[float, ...]:
        otherwise = instead or (0.0,) * places
        return tuple(statistics.median(spent.get((cost, place), [otherwise[place]])) for place in range(places))

    def where_spent(cost: str, instead: Sequence[float] = ()) -> tuple[float, ...]:
        return median(cost, num_stages, instead) if any(key == cost for key, _ in spent) else ()

    forward = median("forward", num_stages)
    split = [sum(pair) for pair in zip(median("input_gradient", num_stages), median("weight_gradient", num_stages))]
    whole = median("backward", num_stages, split)
    half = tuple(one / 2 for one in whole)
    return Costs(
        forward=forward,
        backward=whole,
        recompute=median("recompute", num_stages, forward),
        hop_forward=median("hop_forward", num_stages - 1),
        hop_backward=median("hop_backward", num_stages - 1),
        input_gradient=where_spent("input_gradient", half),
        weight_gradient=where_spent("weight_gradient", half),
        reduce=where_spent("reduce"),
        offload=where_spent("offload", forward),
        reduce_shared=where_spent("reduce_shared"),
    )
