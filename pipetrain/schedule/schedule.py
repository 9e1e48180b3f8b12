"""A schedule is a value: per rank and lane an ordered list of ops, and what each op waits for.

Devices and `simulate` obey this rule, and `check` proves that the step ends under it:

    An op starts when every op in its waits has ended and the op before it in its queue has ended. For a transfer (a message or
    a REDUCE_GRAD), the one before it only has to have started. The transfers of one queue end in their order.

So only a wait or the order of a queue makes one op come after another. An op waits only for ops of its own rank, because an
executor does not know the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pipetrain.schedule.kinds import PASS_SEQUENCES, Direction
from pipetrain.schedule.op import Lane, Op, Queue, queue_of
from pipetrain.schedule.policy import RecomputePolicy


def in_parts(op: Op, num_parts: int) -> tuple[Op, ...]:
    """An op like `op` for each part of its stage, the last part first; `op` itself if the stage has one part."""
    if num_parts == 1:
        return (op,)
    return tuple(Op(op.stage, op.kind, op.microbatch, part) for part in reversed(range(num_parts)))


@dataclass(frozen=True)
class Schedule:
    """The ops of every rank and lane, their order and their waits.

    `lanes[rank][lane]` are the ops of one lane in order. A lane is one queue, but `SEND` and `RECV` have a queue for each stage
    edge and direction: ops of one lane that use different edges do not wait for each other. `REDUCE` is one queue of transfers.

    `waits[op]` are the ops of the same rank that must have ended before `op` starts (for RECV: before it is posted), apart from
    those before it in its queue. A RECV and its SEND end together. So do the REDUCE_GRAD that take part in one sum, on both
    stages and in all replicas. These pairs are not in `waits`.

    `kept` are the pairs (stage, microbatch) whose set stays from F to the end of their backward. Each other pair with a
    backward has an R, or an OFFLOAD and a RELOAD. Stages below `first_backward` have no backward, R and gradient messages:
    nothing in them or before them needs a gradient. With forwards only, `first_backward` is `num_stages`.

    `transport_ahead` is the number of tensors per link that may arrive ahead of use; stashed inputs all may.

    `tied` are the pairs of stages (lower, higher) that share parameters: one bucket of gradients each, numbered in this order.

    `num_replicas` pipelines run this schedule side by side, each with microbatches of its own. With several, the gradients of each stage
    are summed over them. Ranks are those of one replica.

    `order[rank]` is empty if no set is offloaded. Else it has the ops of COMPUTE, RECOMPUTE and the copies of a rank, in the
    order in which they take and free slots: an op that frees one (B, W, OFFLOAD) stands where it ends, any other where it starts.

    `launch_order[rank]` are all ops of a rank in the order in which its host launches them on a device (`launches.py`). It is
    empty where the host itself waits for messages: there an op starts as soon as it may.
    """

    family: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    policy: RecomputePolicy
    lanes: tuple[Mapping[Lane, tuple[Op, ...]], ...]
    waits: Mapping[Op, tuple[Op, ...]]
    kept: frozenset[tuple[int, int]]
    first_backward: int = 0
    transport_ahead: int = 2
    launch_order: tuple[tuple[Op, ...], ...] = ()
    order: tuple[tuple[Op, ...], ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    num_replicas: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.lanes)

    def lane(self, rank: int, lane: Lane) -> tuple[Op, ...]:
        return self.lanes[rank].get(lane, ())

    def ops(self) -> Iterator[tuple[int, Lane, Op]]:
        """Every op with its rank and lane, rank by rank."""
        for rank, lanes in enumerate(self.lanes):
            for lane, ops in lanes.items():
                for op in ops:
                    yield rank, lane, op

    @functools.cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) whose set goes to host memory between F and its backward."""
        lanes = (self.lane(rank, Lane.OFFLOAD) for rank in range(self.num_ranks))
        return frozenset((op.stage, op.microbatch or 0) for lane in lanes for op in lane)

    def with_compute(self, lanes: Iterable[Iterable[Op]]) -> Schedule:
        """The same with other compute lanes, one per rank."""
        pairs = zip(self.lanes, lanes)
        return replace(self, lanes=tuple({**of_rank, Lane.COMPUTE: tuple(ops)} for of_rank, ops in pairs))

    def comes_after(self, op: Op) -> tuple[Op, ...]:
        """What must have ended before `op` starts: its waits, and the op before it in its queue (of transfers, its start)."""
        before = self._before.get(op)
        return self.waits.get(op, ()) if before is None else (*self.waits.get(op, ()), before)

    @functools.cached_property
    def _before(self) -> dict[Op, Op]:
        """For each op the one before it in its queue; the first of a queue has none."""
        found: dict[Op, Op] = {}
        last: dict[tuple[int, Queue], Op] = {}
        for rank, lane, op in self.ops():
            queue = rank, queue_of(lane, op)
            if queue in last:
                found[op] = last[queue]
            last[queue] = op
        return found

    def way(self, direction: Direction, stage: int, microbatch: int | None) -> tuple[Op, ...]:
        """The ops in which `microbatch` passes `stage` in this direction, in order: F; or B, or I and W, or B of each part."""
        unusual = self._unusual_ways.get((direction, stage, microbatch))
        return unusual or tuple(Op(stage, kind, microbatch) for kind in PASS_SEQUENCES[direction][0])

    @functools.cached_property
    def _unusual_ways(self) -> dict[tuple[Direction, int, int | None], tuple[Op, ...]]:
        """The way of each microbatch that passes a stage in another sequence than the default."""
        unusual = {
            kind: (direction, way) for direction, ways in PASS_SEQUENCES.items() for way in ways[1:] for kind in way
        }
        found = {}
        for rank in range(self.num_ranks):
            for op in self.lane(rank, Lane.COMPUTE):
                if op.kind in unusual:
                    direction, way = unusual[op.kind]
                    ops = tuple(Op(op.stage, kind, op.microbatch) for kind in way)
                    found[direction, op.stage, op.microbatch] = ops
                elif op.part is not None and op.kind.row.direction is not None:
                    parts = in_parts(op, self.policy.num_parts(op.stage))
                    found[op.kind.row.direction, op.stage, op.microbatch] = parts
        return found
