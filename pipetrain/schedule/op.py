"""One unit of work in a schedule, and its one spelling.

    2R1        stage 2 recomputes microbatch 1        0SEND_F1    stage 0 sends the output of microbatch 1 on
    2R1.3      only layer 3 of the stage              0SEND_F1>3  ... to stage 3, which is not its neighbour
    2STEP      the optimizer step of stage 2          2REDUCE_GRAD.0   bucket 0 of the gradient all-reduce

This is the spelling of torch.distributed.pipelining plus `R`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """What an op does. The value is its spelling."""

    F = "F"  # forward
    R = "R"  # recompute: the stage's forward a second time, to get the set back
    B = "B"  # backward
    SEND_F = "SEND_F"  # the output of F to the next stage
    RECV_F = "RECV_F"  # the input of F from the stage before
    SEND_B = "SEND_B"  # the gradient of the input to the stage before
    RECV_B = "RECV_B"  # the gradient of the output from the next stage
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    @property
    def computes(self) -> bool:
        """Whether the op occupies the rank's device: a rank runs one of these at a time."""
        return self in _COMPUTES


_COMPUTES = frozenset({Kind.F, Kind.R, Kind.B})
_PER_STAGE = frozenset({Kind.REDUCE_GRAD, Kind.STEP})
_SPELLING = re.compile(
    r"(?P<stage>\d+)(?P<kind>[A-Z_]*[A-Z])(?P<microbatch>\d+)?(?:\.(?P<part>\d+))?(?:>(?P<peer>\d+))?"
)


class Lane(enum.StrEnum):
    """A logical queue of a rank. In `SEND` and `RECV` each stage edge and direction is a queue of its own."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, slots=True)
class Op:
    """`kind` done by `stage` for `microbatch` (None for STEP and REDUCE_GRAD, which belong to no microbatch).

    `part` is a layer of the stage (R, F, B) or a bucket (REDUCE_GRAD). `peer` is the other stage of a transfer,
    where it is not the neighbour.
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

    @staticmethod
    def parse(text: str) -> Op:
        """The op that `text` spells.

        Raises:
            ValueError: `text` spells no op.
        """
        match = _SPELLING.fullmatch(text.strip())
        kind = Kind.__members__.get(match["kind"]) if match else None
        if match is None or kind is None or (match["microbatch"] is None) != (kind in _PER_STAGE):
            raise ValueError(
                f"{text!r} is not an op: write stage, kind and microbatch, as in 2F0; kinds: {' '.join(Kind)}"
            )
        number = {key: None if match[key] is None else int(match[key]) for key in ("microbatch", "part", "peer")}
        return Op(int(match["stage"]), kind, number["microbatch"], number["part"], number["peer"])
