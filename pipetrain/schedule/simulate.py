"""Runs a schedule on costs instead of devices, and returns a timeline like that of a measured run.

The model (the runtime does the same, but on a GPU an R of the recompute lane may overlap with other ops):

- A rank runs one op that computes at a time, to its end. When it is free it takes the head of its compute lane if all that
  this op waits for has ended, otherwise the head of its recompute lane if that one may run. `halves.py` puts the W of its
  drafts into the reduce lane. A rank runs these only when it can run nothing else, so the result shows where they fill waits.
- Copies to host memory and copies back are two more queues of a rank. Each runs one copy at a time, beside ops that compute.
  In a schedule with copies all messages take `Costs.copy_contention` times as long.
- A tensor travels when its send may start, its receive is posted and the tensor before it on the same link has
  arrived; send and receive end together. So do the two ends of a REDUCE_GRAD. None of them occupies the rank.
- One replica is simulated; the others are assumed to keep pace with it. So a REDUCE_GRAD over the replicas starts as soon as it may start
  in this one. Those of a rank run one after the other, as over one link.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.graph import OpGraph, find_cycle, op_graph
from pipetrain.schedule.kinds import COPY_LANES
from pipetrain.schedule.op import Lane
from pipetrain.schedule.schedule import Schedule

_ShareOf = Callable[[int, int | None], float]  # of a part of a stage

_LANES = (Lane.COMPUTE, Lane.RECOMPUTE, Lane.REDUCE)  # in the order in which a free rank tries them

# Ops that end this close together (relative to the clock) end at one moment. Else rounding in the last digit of an arrival would
# let an R slip in before the B that is ready at the same time.
_SAME_MOMENT = 1e-12


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of one step, in seconds from the start of the first op. Deterministic.

    Raises:
        ValueError: the costs are for another number of stages, an op has no cost, or the schedule deadlocks; the message
            then has the ops that wait, each for the next.
    """
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"the costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
    run = _Run(op_graph(schedule), costs.beside_copies() if schedule.offloaded else costs, schedule.policy.share_of)
    run.to_end()
    if min(run.end, default=0.0) < 0.0:
        chain = ", which waits for ".join(map(str, find_cycle(schedule)))
        raise ValueError(f"the schedule comes to a stop: {chain}, which cannot run; `check` says which rule it breaks")
    return Timeline(schedule.num_ranks, run.events())


class _Run:
    """The state of one simulation: a heap of the times at which running ops end, and per unit the next op of each of its lanes.

    A unit runs one op at a time. Unit r is the device of rank r, which runs `_LANES`. Each lane of copies is a further unit.
    """

    def __init__(self, graph: OpGraph, costs: Costs, share_of: _ShareOf) -> None:
        self.graph = graph
        tables = {key: costs.of(*key) for key in {(op.kind, op.peer is not None) for op in graph.ops}}
        self.seconds = [tables[op.kind, op.peer is not None][op.stage] for op in graph.ops]
        for place, op in enumerate(graph.ops):
            if op.part is not None and op.peer is None:  # a segment takes its share of its stage
                self.seconds[place] *= share_of(op.stage, op.part)
        self.pending = list(graph.num_before)
        self.start = [-1.0] * len(graph.ops)  # of a send or receive: when it was ready for its partner
        self.end = [-1.0] * len(graph.ops)
        self.ends: list[tuple[float, int]] = []
        self.unit = list(graph.ranks)  # of each op
        units = [[lanes[lane] for lane in _LANES] for lanes in graph.lanes]
        for copies in (lanes[lane] for lanes in graph.lanes for lane in COPY_LANES if lanes[lane]):
            self.unit[copies.start : copies.stop] = [len(units)] * len(copies)
            units.append([copies])
        self.heads = [[queue.start for queue in queues] for queues in units]
        # Transfers in the reduce lane wait for their partner and do not occupy the rank.
        self.stops = [
            [queue.start if queue and graph.transfers[queue.start] else queue.stop for queue in queues]
            for queues in units
        ]
        self.busy = [False] * len(units)

    def to_end(self) -> None:
        for place, is_transfer in enumerate(self.graph.transfers):
            if is_transfer and self.pending[place] == 0:
                self._ready_for_partner(place, 0.0)
        touched = set(range(len(self.busy)))
        now = 0.0
        while True:
            now, touched = self._finish_moment(now, touched)
            for unit in sorted(touched):
                self._start_next(unit, now)
            if not self.ends:
                break
            now, touched = self.ends[0][0], set()

    def _finish_moment(self, now: float, touched: set[int]) -> tuple[float, set[int]]:
        """Ends all ops that end now; returns the last of their times and the units that may have something to start."""
        ends, after, pending, transfers = self.ends, self.graph.after, self.pending, self.graph.transfers
        until = now * (1 + _SAME_MOMENT)
        while ends and ends[0][0] <= until:
            now, place = heapq.heappop(ends)
            self.end[place] = now
            ended = [place]
            if transfers[place]:
                other = self.graph.partner[place]
                if other >= 0:
                    self.end[other] = now
                    ended.append(other)
            else:
                self.busy[self.unit[place]] = False
                touched.add(self.unit[place])
            for one in ended:
                for follower in after[one]:
                    pending[follower] -= 1
                    if pending[follower] == 0:
                        if transfers[follower]:
                            self._ready_for_partner(follower, now)
                        else:
                            touched.add(self.unit[follower])
        return now, touched

    def _ready_for_partner(self, place: int, now: float) -> None:
        self.start[place] = now
        other, seconds = self.graph.partner[place], self.seconds
        if other >= 0 and self.start[other] >= 0.0:
            leads = other if self.graph.op_lanes[place] is Lane.RECV else place
            heapq.heappush(self.ends, (now + max(seconds[place], seconds[other]), leads))
        elif other < 0 and self.graph.ops[place].is_replica_allreduce:
            heapq.heappush(self.ends, (now + seconds[place], place))

    def _start_next(self, unit: int, now: float) -> None:
        if self.busy[unit]:
            return
        heads, stops = self.heads[unit], self.stops[unit]
        for lane, place in enumerate(heads):
            if place < stops[lane] and self.pending[place] == 0:
                heads[lane] = place + 1
                self.start[place] = now
                self.busy[unit] = True
                heapq.heappush(self.ends, (now + self.seconds[place], place))
                return

    def events(self) -> tuple[OpEvent, ...]:
        graph, start, end = self.graph, self.start, self.end
        return tuple(
            OpEvent(rank, graph.op_lanes[place], graph.ops[place], start[place], end[place])
            for rank, lanes in enumerate(graph.lanes)
            for place in sorted(itertools.chain(*lanes.values()), key=start.__getitem__)
        )
