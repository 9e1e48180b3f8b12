"""One row per kind of op: what every pass, check, cost, file and drawing knows of it.

    kind    lane      receives sends    reads   allocates         frees         cost
    F       compute   RECV_F   SEND_F           stash, kept set                 forward
    R       compute*                    F       recomputed set                  recompute
    B       compute   RECV_B   SEND_B   F                         all three     backward
    I       compute   RECV_B   SEND_B   F                                       input_gradient
    W       compute                     I                         all three     weight_gradient
    CALL    compute
    SEND_F  send                        F                                       hop_forward
    REDUCE_GRAD reduce                                                          reduce
    ...                                 * the recompute lane where recomputation overlaps

A kind is read by its row (`op.kind.row`), never by its name. To add one: its spelling in `Kind`, its row in `_ROWS`, its
place among the ops of a pass in `PASS_SEQUENCES`, if it has one; the executor has one entry for it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Lane(enum.StrEnum):
    """A logical queue of a rank. In `SEND` and `RECV` each stage edge and direction is a queue of its own."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"


class Kind(enum.StrEnum):
    """What an op does. The value is its spelling."""

    F = "F"  # forward
    R = "R"  # recompute: the stage's forward a second time, to get the set back
    B = "B"  # backward
    I = "I"  # noqa: E741  # the half of backward that gives the gradient of the input
    W = "W"  # the other half: the gradients of the weights
    CALL = "CALL"  # a function of the user's, where a generator or a file puts it
    SEND_F = "SEND_F"  # the output of F to the next stage
    RECV_F = "RECV_F"  # the input of F from the stage before
    SEND_B = "SEND_B"  # the gradient of the input to the stage before
    RECV_B = "RECV_B"  # the gradient of the output from the next stage
    REDUCE_GRAD = "REDUCE_GRAD"  # a bucket of gradients, added up with who has the same parameters: another stage, the other replicas
    STEP = "STEP"  # the optimizer step of a stage

    # Ops are hashed millions of times; the hash of Enum is a function of Python.
    __hash__ = str.__hash__

    @functools.cached_property
    def row(self) -> KindRow:
        return _ROWS[self]

    @functools.cached_property
    def computes(self) -> bool:
        """Whether the op occupies the rank's device: a rank runs one of these at a time."""
        return self.row.lane is Lane.COMPUTE


class Direction(enum.IntEnum):
    """Which way a tensor goes from stage to stage; the value is the step to the next stage on that way."""

    FORWARD = 1  # activations
    BACKWARD = -1  # gradients


class Holding(enum.Enum):
    """What a stage holds of a microbatch from one op to another."""

    STASH = "stash"  # its input or its set, from F to the end of its backward
    KEPT_SET = "kept set"  # the set of F, where it is kept
    RECOMPUTED_SET = "recomputed set"  # where it is not, from R on


_EVERYTHING = frozenset(Holding)


@dataclass(frozen=True, slots=True)
class KindRow:
    """The facts of a kind of op. Other ops that it names are those of the same stage and microbatch."""

    lane: Lane
    overlap_lane: Lane | None = None  # where it runs instead if recompute.mode=overlap
    per_stage: bool = False  # it belongs to a stage, not to a microbatch
    direction: Direction | None = None  # of the boundary tensor that it reads, writes or moves
    recv_kind: Kind | None = None  # the receive whose tensor it reads, where the neighbour lives on another rank
    send_kind: Kind | None = None  # the send of its result, likewise
    peer_kind: Kind | None = None  # the other end of a transfer
    reads: tuple[Kind, ...] = ()  # the ops without which it has nothing to work on, as far as the schedule has them
    needs_set: bool = False  # it reads the set, so that its R comes before it where the set is not kept
    allocates: frozenset[Holding] = frozenset()  # what the stage holds from its start
    frees: frozenset[Holding] = frozenset()  # ... and until its end
    cost: str | None = None  # the field of `Costs`; None: nothing is known of its time, which counts as 0
    runs: bool = True  # whether the executor has an entry for it
    calls: bool = False  # whether it needs a function of the user's

    @property
    def uses_edge_after(self) -> bool:
        """Whether a message uses the edge after its stage rather than the one before it."""
        return (self.direction is Direction.FORWARD) == (self.lane is Lane.SEND)

    @property
    def looks(self) -> str | None:
        """How it is drawn, a name in `monitor/draw/palette.py`; None: not at all, as a message."""
        return (self.cost or "call").replace("_", " ") if self.runs and self.lane not in MESSAGE_LANES else None

    def lane_in(self, overlap: bool) -> Lane:
        """Its lane, with or without overlapping recomputation."""
        return self.overlap_lane if overlap and self.overlap_lane is not None else self.lane


_ROWS: Mapping[Kind, KindRow] = {
    Kind.F: KindRow(
        Lane.COMPUTE,
        direction=Direction.FORWARD,
        recv_kind=Kind.RECV_F,
        send_kind=Kind.SEND_F,
        allocates=frozenset({Holding.STASH, Holding.KEPT_SET}),
        cost="forward",
    ),
    Kind.R: KindRow(
        Lane.COMPUTE,
        overlap_lane=Lane.RECOMPUTE,
        reads=(Kind.F,),
        allocates=frozenset({Holding.RECOMPUTED_SET}),
        cost="recompute",
    ),
    Kind.B: KindRow(
        Lane.COMPUTE,
        direction=Direction.BACKWARD,
        recv_kind=Kind.RECV_B,
        send_kind=Kind.SEND_B,
        reads=(Kind.F,),
        needs_set=True,
        frees=_EVERYTHING,
        cost="backward",
    ),
    Kind.I: KindRow(
        Lane.COMPUTE,
        direction=Direction.BACKWARD,
        recv_kind=Kind.RECV_B,
        send_kind=Kind.SEND_B,
        reads=(Kind.F,),
        needs_set=True,
        cost="input_gradient",
    ),
    Kind.W: KindRow(
        Lane.COMPUTE,
        reads=(Kind.I,),
        needs_set=True,
        frees=_EVERYTHING,
        cost="weight_gradient",
    ),
    Kind.CALL: KindRow(Lane.COMPUTE, calls=True),
    Kind.SEND_F: KindRow(
        Lane.SEND, direction=Direction.FORWARD, peer_kind=Kind.RECV_F, reads=(Kind.F,), cost="hop_forward"
    ),
    Kind.RECV_F: KindRow(Lane.RECV, direction=Direction.FORWARD, peer_kind=Kind.SEND_F, cost="hop_forward"),
    Kind.SEND_B: KindRow(
        Lane.SEND, direction=Direction.BACKWARD, peer_kind=Kind.RECV_B, reads=(Kind.B, Kind.I), cost="hop_backward"
    ),
    Kind.RECV_B: KindRow(Lane.RECV, direction=Direction.BACKWARD, peer_kind=Kind.SEND_B, cost="hop_backward"),
    # It reads what all backwards of its stage, or of its part of it, have added up, and gives all who have a copy the sum. Only where
    # the copy is another stage's it meets an op of the same schedule: all replicas run the same one.
    Kind.REDUCE_GRAD: KindRow(Lane.REDUCE, per_stage=True, peer_kind=Kind.REDUCE_GRAD, cost="reduce"),
    Kind.STEP: KindRow(Lane.REDUCE, per_stage=True, runs=False),
}

# The ops in which a microbatch passes a stage in each direction: all of one sequence, in this order. The first op reads the boundary
# tensor and writes the next; with the last op backward the stage is done with the microbatch. The first sequence is the default.
PASS_SEQUENCES: Mapping[Direction, tuple[tuple[Kind, ...], ...]] = {
    Direction.FORWARD: ((Kind.F,),),
    Direction.BACKWARD: ((Kind.B,), (Kind.I, Kind.W)),
}
MESSAGE_LANES = (Lane.SEND, Lane.RECV)
# Of the transfers of one queue the host only has to have started the one before; they end in their order.
TRANSFER_LANES = (*MESSAGE_LANES, Lane.REDUCE)


def kinds_where(holds: Callable[[KindRow], bool]) -> frozenset[Kind]:
    """The kinds whose rows fulfil a condition."""
    return frozenset(kind for kind in Kind if holds(kind.row))


(RECOMPUTE,) = kinds_where(lambda row: Holding.RECOMPUTED_SET in row.allocates)

# All-reduces of gradients, once all of a stage's backwards have added theirs.
REDUCING = kinds_where(lambda row: row.per_stage and row.peer_kind is not None)

# All in which a stage may add to the gradients of its parameters.
GIVES_GRADIENTS = frozenset(kind for way in PASS_SEQUENCES[Direction.BACKWARD] for kind in way)

# What only finishes a backward: nobody waits for it, and the gradient of the input has gone before.
FINISHING = frozenset(kind for way in PASS_SEQUENCES[Direction.BACKWARD] for kind in way[1:])
