"""The pass for devices: in which order each host launches its ops, and what transfers and their tensors wait for there.

A device has streams: its host launches an op and goes on, maybe a whole step ahead, while the device waits for the
first message. A host cannot take back a launch. An op may also wait for all ops that its rank launched before. For example,
the allocator or the loading of a kernel waits for the whole device, streams share a queue of the hardware, or a device
runs one transfer at a time. Any such wait may hang all ranks. So ranks launch in one order:

    all      0F0 0SEND_F0=1RECV_F0 0F1 1F0 0SEND_F1=1RECV_F1 1B0 1SEND_B0=0RECV_B0 1F1 ...
    rank 0   0F0 0SEND_F0          0F1     0SEND_F1              0RECV_B0              ...
    rank 1                1RECV_F0     1F0          1RECV_F1 1B0 1SEND_B0          1F1 ...

    [1] an op comes after all ops that it waits for, and the two ends of a transfer have one position. So no op waits for a
        later op of its rank, even if each waits for all that its rank has launched before.
    [2] R comes right after the last op that it waits for. The stream of R waits for the backward of each set that the host has
        freed by then. So R may use the memory of these sets at once.
    [3] F waits for the third last SEND_F of its stage that is launched before it, and B likewise for SEND_B. So few outputs
        are unsent at once.
    [4] a receive waits for the last compute op of its own rank that its tensor depends on, for example 0RECV_B0 for
        0F0: the tensor cannot come earlier

The order costs no time while the host is ahead, because waits decide when an op runs. [4] costs none, because the op that it
waits for ends before the message can come. Sends to a slow receiver come late in the launch order. [3] does not count those
after an F, so the unsent outputs are not bounded. This happens in GPipe whose last stage alternates F and B: there F would have
to wait for the receiver's B. The bounds of sets and stash hold however far the host is ahead (`alive.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipetrain.schedule.alive import ended_before
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.graph import op_graph, run_order
from pipetrain.schedule.kinds import RECOMPUTE
from pipetrain.schedule.messages import partner_of, send_of
from pipetrain.schedule.op import Kind, Lane, Op, Queue, queue_of
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

# Outputs may be in transfer while the next is computed. If hops take as long as F, a step gets up to 50 % longer with 1 unsent output,
# up to 1.5 % longer with 2, and no longer with 3, in any family and mode.
MOST_UNSENT = 3

Wait = tuple[Op, Op]  # (op, what it waits for)


def for_device(schedule: Schedule) -> Schedule:
    """`schedule`, which `check` has passed, as devices run it: with its `launch_order` and waits of [2], [3] and [4].

    All added waits follow the one order, so they close no cycle. No family has an R for which [2] adds a wait.
    """
    waits = defaultdict(list, {op: list(awaited) for op, awaited in schedule.waits.items()})
    order = _one_order(schedule)
    ranks: list[list[Op]] = [[] for _ in range(schedule.num_ranks)]
    for op in order:
        ranks[schedule.stage_ranks[op.stage]].append(op)
    launched = dataclasses.replace(schedule, launch_order=tuple(map(tuple, ranks)))
    for find in (_waits_for_memory, _waits_for_sends, _waits_of_receives):
        for op, awaited in find(launched, order):
            waits[op].append(awaited)
        launched = dataclasses.replace(launched, waits={op: tuple(dict.fromkeys(own)) for op, own in waits.items()})
    return launched


def _one_order(schedule: Schedule) -> list[Op]:
    """[1] and [2]: all ops in the order of their starts if hops took no time, but each R as early as it may be launched."""
    graph = op_graph(schedule)
    started = {event.op: event.start for event in simulate(schedule, Costs.spread(schedule.num_stages)).events}
    turns = []
    for place, (op, lane) in enumerate(zip(graph.ops, graph.op_lanes)):
        if lane is Lane.RECOMPUTE:
            turns.append((-1.0, 0))
        elif graph.partner[place] >= 0:
            turns.append((max(started[op], started[graph.ops[graph.partner[place]]]), 0))
        else:
            turns.append((started[op], 1))
    return [graph.ops[place] for place in run_order(graph, turns)]


def recomputed_too_early(schedule: Schedule) -> Iterator[tuple[Op, Op]]:
    """Pairs (R, op): the host launches R after `op`, which reads a set, but the device may run R before `op` has ended.

    When the host has launched `op`, the memory of its set is free for the next R.
    """
    for rank, launched in enumerate(schedule.launch_order):
        ended = ended_before(schedule, rank)
        number, reader = 0, None  # compute ops launched so far; the last of them that reads a set, as (its number, op)
        for op in launched:
            if op.kind is RECOMPUTE and reader is not None and ended[op][0] < reader[0]:
                yield op, reader[1]
            if _lane(schedule, op) is Lane.COMPUTE:
                number += 1
                reader = (number, op) if op.kind.row.needs_set else reader


def _waits_for_memory(schedule: Schedule, _: Sequence[Op]) -> Iterator[Wait]:
    yield from recomputed_too_early(schedule)  # [2]


def _waits_for_sends(schedule: Schedule, order: Sequence[Op]) -> Iterator[Wait]:
    """[3]"""
    place = {op: number for number, op in enumerate(order)}
    sends: dict[tuple[int, Kind], list[Op]] = defaultdict(list)
    for op in order:
        if op.kind.row.lane is Lane.SEND:
            sends[op.stage, op.kind].append(op)
    for rank in range(schedule.num_ranks):
        for op in schedule.lane(rank, Lane.COMPUTE):
            send = send_of(schedule, op)
            if send is None:
                continue
            queue = sends[send.stage, send.kind]
            left = bisect.bisect_left(queue, place[op], key=place.__getitem__)
            if left >= MOST_UNSENT:
                yield op, queue[left - MOST_UNSENT]


def _waits_of_receives(schedule: Schedule, order: Sequence[Op]) -> Iterator[Wait]:
    """[4]"""
    ended: dict[Op, list[int]] = {}  # op -> per rank, how many compute ops have ended when it has
    posted: dict[Queue, int] = {}  # queue -> compute ops of its rank that have ended when its last receive is posted
    nothing = [0] * schedule.num_ranks
    for op in order:
        rank, lane = schedule.stage_ranks[op.stage], _lane(schedule, op)
        ended[op] = functools.reduce(_later, (ended[other] for other in schedule.comes_after(op)), nothing)
        if lane is Lane.COMPUTE:
            ended[op] = [*ended[op]]
            ended[op][rank] += 1
        elif lane is Lane.RECV:
            sent = ended[partner_of(op)]
            known, queue = ended[op][rank], queue_of(lane, op)
            if sent[rank] > max(known, posted.get(queue, 0)):
                yield op, schedule.lane(rank, Lane.COMPUTE)[sent[rank] - 1]
            posted[queue] = max(known, sent[rank], posted.get(queue, 0))
            ended[op] = ended[partner_of(op)] = _later(sent, ended[op])


def _later(first: list[int], second: list[int]) -> list[int]:
    return first if first is second else list(map(max, first, second))


def _lane(schedule: Schedule, op: Op) -> Lane:
    return op.kind.row.lane_in(schedule.policy.mode is Mode.OVERLAP)
