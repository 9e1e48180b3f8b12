"""A schedule with numbers for names: what `simulate` and `check` walk over.

Ops are numbered rank by rank and lane by lane. In `after`, an op follows its waits and, in `SEND`, `RECV` and
`REDUCE`, the op before it in its queue. The order of the other lanes is not in it: see `lanes`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipetrain.schedule.kinds import COPY_LANES, TRANSFER_LANES
from pipetrain.schedule.messages import partner_of
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule


@dataclass(frozen=True)
class OpGraph:
    """`after[n]` are the ops that wait for op n. `num_before[n]` counts the ops that n waits for, also those that the schedule lacks.

    `partner[n]` is the other end of a transfer, -1 where there is none; `transfers[n]` says whether op n is one. `lanes[rank][lane]` are op numbers in order.
    """

    ops: list[Op]
    ranks: list[int]
    op_lanes: list[Lane]
    transfers: list[bool]
    number: dict[Op, int]
    after: list[list[int]]
    num_before: list[int]
    partner: list[int]
    lanes: list[dict[Lane, range]]


def op_graph(schedule: Schedule) -> OpGraph:
    """The graph of a schedule whose ops are all different."""
    ops: list[Op] = []
    ranks: list[int] = []
    op_lanes: list[Lane] = []
    lanes: list[dict[Lane, range]] = []
    for rank in range(schedule.num_ranks):
        lanes.append({})
        for lane in Lane:
            queue = schedule.lane(rank, lane)
            lanes[rank][lane] = range(len(ops), len(ops) + len(queue))
            ops += queue
            ranks += [rank] * len(queue)
            op_lanes += [lane] * len(queue)
    number = {op: place for place, op in enumerate(ops)}
    after: list[list[int]] = [[] for _ in ops]
    num_before = [0] * len(ops)
    for place, op in enumerate(ops):
        awaited = schedule.comes_after(op) if op_lanes[place] in TRANSFER_LANES else schedule.waits.get(op, ())
        num_before[place] += len(awaited)
        for one in awaited:
            before = number.get(one)
            if before is not None:
                after[before].append(place)
    partner = [-1] * len(ops)
    for of_rank in lanes:
        for place in (*of_rank[Lane.SEND], *(one for one in of_rank[Lane.REDUCE] if ops[one].peer is not None)):
            other = partner[place] = number.get(partner_of(ops[place]), -1)
            if other >= 0:
                partner[other] = place
    transfers = [op.kind.row.peer_kind is not None for op in ops]
    return OpGraph(ops, ranks, op_lanes, transfers, number, after, num_before, partner, lanes)


def find_cycle(schedule: Schedule, chains: Sequence[Sequence[Op]] = ()) -> list[Op]:
    """A cycle of ops: each waits for the next, and the last for the first. Empty if the schedule ends.

    The two ends of a transfer, which block until both may run, count as one. The ops of each of `chains` also run one after the
    other, in addition to the waits and queues of the schedule.
    """
    graph = op_graph(schedule)
    before = {}
    for chain in chains:
        for first, second in itertools.pairwise(graph.number[op] for op in chain):
            graph.after[first].append(second)
            graph.num_before[second] += 1
            before[second] = first
    ended = [False] * len(graph.ops)
    for place in run_order(graph, range(len(graph.ops))):
        ended[place] = True
    left = next((place for place, done in enumerate(ended) if not done), None)
    path: list[int] = []
    while left is not None and left not in path:
        path.append(left)
        # what keeps the op from running: its waits, the op before it in its queue or its chain, or the other end of its transfer
        awaited = (graph.number.get(other, -1) for other in schedule.comes_after(graph.ops[left]))
        blockers = (*awaited, before.get(left, -1), graph.partner[left])
        left = next((other for other in blockers if other >= 0 and not ended[other]), None)
    cycle = path[path.index(left) :] if left is not None else path
    return [graph.ops[place] for place in cycle]


def run_order(graph: OpGraph, turns: Sequence[Any]) -> list[int]:
    """The ops that can run, in an order that obeys all waits and queues. The smallest entry of `turns` says which runs next.

    The two ends of a transfer come together, the send right before its receive.
    """
    pending = list(graph.num_before)
    queues = (lanes[lane] for lanes in graph.lanes for lane in (Lane.COMPUTE, Lane.RECOMPUTE, *COPY_LANES))
    behind = {place: place + 1 for queue in queues for place in queue[:-1]}  # the next op of each lane
    for place in behind.values():
        pending[place] += 1
    ready = [(turns[place], place) for place, count in enumerate(pending) if count == 0]
    heapq.heapify(ready)
    ended = [False] * len(pending)
    order = []
    while ready:
        _, place = heapq.heappop(ready)
        other = graph.partner[place]
        if ended[place] or (other >= 0 and pending[other] > 0):
            continue
        for one in (place,) if other < 0 else (other, place) if graph.op_lanes[place] is Lane.RECV else (place, other):
            ended[one] = True
            order.append(one)
            for follower in (*graph.after[one], behind[one]) if one in behind else graph.after[one]:
                pending[follower] -= 1
                if pending[follower] == 0:
                    heapq.heappush(ready, (turns[follower], follower))
    return order
