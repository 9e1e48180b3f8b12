"""One unit of work in a schedule, and its one spelling.

    2R1        stage 2 recomputes microbatch 1        0SEND_F1    stage 0 sends the output of microbatch 1 on
    2R1.3      only part 3 of the stage               0SEND_F1>3  ... to stage 3 (but `check` refuses it)
    2CALL1     the user's function, on stage 2        3REDUCE_GRAD.0>0 stage 3 adds up bucket 0 of its gradients with stage 0
                                                      2REDUCE_GRAD.0   ... stage 2 with the other replicas

This is the spelling of torch.distributed.pipelining plus `R`; `kinds.py` has the kinds.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipetrain.schedule.kinds import MESSAGE_LANES, REDUCING, Kind, Lane

__all__ = ["Kind", "Lane", "Op", "Queue", "queue_of"]  # Kind and Lane are re-exported

Queue = Lane | tuple[int, Kind]  # the name of a queue: its lane, or of messages (stage, kind)

_SPELLING = re.compile(
    r"(?P<stage>\d+)(?P<kind>[A-Z_]*[A-Z])(?P<microbatch>\d+)?(?:\.(?P<part>\d+))?(?:>(?P<peer>\d+))?"
)


class Op(NamedTuple):  # a tuple, because ops are made and hashed very often; a plain class takes 4 times as long
    """`kind` done by `stage` for `microbatch` (None for REDUCE_GRAD, which belongs to no microbatch).

    `part` is a segment of the stage, from 0 (R, B, copies), or a bucket (REDUCE_GRAD); None: all of it. `peer` of a message is
    the stage at the other end; None: the neighbour. `peer` of a REDUCE_GRAD is the other stage that has the parameters: the sum
    is over both stages of all replicas. None: the sum is over the replicas of `stage`.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    part: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        part = "" if self.part is None else f".{self.part}"
        peer = "" if self.peer is None else f">{self.peer}"
        return f"{self.stage}{self.kind.value}{microbatch}{part}{peer}"

    @property
    def is_replica_allreduce(self) -> bool:
        """Whether it sums gradients over the replicas of its stage, so that its other ends are in other replicas."""
        return self.peer is None and self.kind in REDUCING

    @staticmethod
    def parse(text: str) -> Op:
        """The op that `text` spells.

        Raises:
            ValueError: `text` spells no op.
        """
        match = _SPELLING.fullmatch(text.strip())
        kind = Kind.__members__.get(match["kind"]) if match else None
        if match is None or kind is None or (match["microbatch"] is None) != (kind.row.per_stage):
            raise ValueError(
                f"{text!r} is not an op: write stage, kind and microbatch, as in 2F0; kinds: {' '.join(Kind)}"
            )
        number = {key: None if match[key] is None else int(match[key]) for key in ("microbatch", "part", "peer")}
        return Op(int(match["stage"]), kind, number["microbatch"], number["part"], number["peer"])


def queue_of(lane: Lane, op: Op) -> Queue:
    """The queue of an op. Messages have a queue per stage and kind, so per edge and direction; any other lane is one queue."""
    return (op.stage, op.kind) if lane in MESSAGE_LANES else lane
