"""A schedule is a value: per rank and lane an ordered list of ops, and what each op waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import RecomputePolicy


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order.

    `lanes[rank][lane]` are the ops of one logical queue in order. Ops of `COMPUTE` and of `RECOMPUTE` run in the order
    of their lane. In `SEND` and `RECV` each (stage edge, direction) is a queue of its own: ops of one lane that use
    different edges do not wait for each other.

    `waits[op]` are the ops that must have ended before `op` starts (for RECV: before it is posted), apart from those
    before it in its queue. A RECV ends when its SEND does; that pairing is not in `waits`.

    `kept` are the (stage, microbatch) whose set stays from F to B; the others of a stage with a B have an R.
    Stages below `first_backward` have no B, no R and no gradient messages: nothing in them or before them needs a
    gradient. It is `num_stages` for a schedule of forwards only.
    """

    family: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    policy: RecomputePolicy
    lanes: tuple[Mapping[Lane, tuple[Op, ...]], ...]
    waits: Mapping[Op, tuple[Op, ...]]
    kept: frozenset[tuple[int, int]]
    first_backward: int = 0

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
