"""One row per kind of op: what every pass, check, cost, file and drawing knows of it.

    kind    lane      receives sends    reads   allocates         frees         cost
    F       compute   RECV_F   SEND_F           stash, kept set                 forward
    R       compute*                    F       recomputed set                  recompute
    B       compute   RECV_B   SEND_B   F                         stash, set    backward
    I       compute   RECV_B   SEND_B   F                                       input_gradient
    W       compute                     I                         stash, set    weight_gradient
    CALL    compute
    OFFLOAD offload                     F       set on the host                 offload
    RELOAD  reload                      OFFLOAD                   set on host   offload
    SEND_F  send                        F                                       hop_forward
    REDUCE_GRAD reduce                                                          reduce
    ...                                 * the recompute lane if recompute.mode=overlap

Passes read the row of a kind (`op.kind.row`) and do not compare its name; generators name the kinds that they order. To add a
kind, add it to `Kind` and its row to `_ROWS`, and give the executor an entry. A part of F or B also goes into `PASS_SEQUENCES`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Lane(enum.StrEnum):
    """A group of ops of a rank. It is one queue, but `SEND` and `RECV` have a queue for each stage edge and direction."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    RELOAD = "reload"


class Kind(enum.StrEnum):
    """What an op does. The value is its spelling."""

    F = "F"  # forward
    R = "R"  # recompute: the stage's forward a second time, to make its set again
    B = "B"  # backward
    I = "I"  # noqa: E741  # the half of backward that gives the gradient of the input
    W = "W"  # the other half: the gradients of the weights
    OFFLOAD = "OFFLOAD"  # copies the set of F to host memory; then its activation slot is free
    RELOAD = "RELOAD"  # copies the set back into an activation slot, before B
    CALL = "CALL"  # a function of the user's, where a generator or a file puts it
    SEND_F = "SEND_F"  # the output of F to the next stage
    RECV_F = "RECV_F"  # the input of F from the stage before
    SEND_B = "SEND_B"  # the gradient of the input to the stage before
    RECV_B = "RECV_B"  # the gradient of the output from the next stage
    REDUCE_GRAD = "REDUCE_GRAD"  # sums a bucket of gradients over the ranks that hold the same parameters

    # Ops are hashed millions of times, and the hash of Enum is slow, because it is written in Python.
    __hash__ = str.__hash__

    @functools.cached_property
    def row(self) -> KindRow:
        return _ROWS[self]

    @functools.cached_property
    def computes(self) -> bool:
        """Whether it computes on the device. R of the recompute lane counts too, though it may overlap with others."""
        return self.row.lane is Lane.COMPUTE


class Direction(enum.IntEnum):
    """The direction of a boundary tensor: from stage s it goes to stage s + the value."""

    FORWARD = 1  # activations
    BACKWARD = -1  # gradients


class Holding(enum.Enum):
    """What a stage holds of a microbatch from one op to another."""

    STASH = "stash"  # its input or its set, from F to the end of its backward
    KEPT_SET = "kept set"  # the set of F, where it is kept
    RECOMPUTED_SET = "recomputed set"  # the set of R, if that of F is neither kept nor offloaded
    HOST_SET = "set on the host"  # in host memory, from the start of OFFLOAD to the end of RELOAD


_EVERYTHING = frozenset({Holding.STASH, Holding.KEPT_SET, Holding.RECOMPUTED_SET})


@dataclass(frozen=True, slots=True)
class KindRow:
    """The facts of a kind of op. Its fields name kinds of the same stage and microbatch, but for `peer_kind`."""

    lane: Lane
    overlap_lane: Lane | None = None  # where it runs instead if recompute.mode=overlap
    per_stage: bool = False  # it belongs to a stage, not to a microbatch
    direction: Direction | None = None  # of the boundary tensor that it reads, writes or moves
    recv_kind: Kind | None = None  # the receive whose tensor it reads, if the neighbour is on another rank
    send_kind: Kind | None = None  # the send of its result, likewise
    peer_kind: Kind | None = None  # the kind at the other end of a transfer, on another rank
    reads: tuple[Kind, ...] = ()  # kinds of ops whose results it reads, if the schedule has them
    needs_set: bool = False  # it reads the set: if F's set is not kept, R or RELOAD comes before
    allocates: frozenset[Holding] = frozenset()  # what the stage holds from the start of this op on
    frees: frozenset[Holding] = frozenset()  # what it no longer holds after the end of this op
    cost: str | None = None  # the field of `Costs` with its time; None: the time counts as 0
    calls: bool = False  # whether it needs a function of the user's

    @property
    def uses_edge_after(self) -> bool:
        """Whether a message uses the edge after its stage rather than the one before it."""
        return (self.direction is Direction.FORWARD) == (self.lane is Lane.SEND)

    @property
    def looks(self) -> str | None:
        """The name in `monitor/draw/palette.py` by which it is drawn; None: it is not drawn, as messages are not."""
        if self.lane in COPY_LANES:
            return self.lane.value
        return (self.cost or "call").replace("_", " ") if self.lane not in MESSAGE_LANES else None

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
    Kind.OFFLOAD: KindRow(Lane.OFFLOAD, reads=(Kind.F,), allocates=frozenset({Holding.HOST_SET}), cost="offload"),
    Kind.RELOAD: KindRow(Lane.RELOAD, reads=(Kind.OFFLOAD,), frees=frozenset({Holding.HOST_SET}), cost="offload"),
    Kind.CALL: KindRow(Lane.COMPUTE, calls=True),
    Kind.SEND_F: KindRow(
        Lane.SEND, direction=Direction.FORWARD, peer_kind=Kind.RECV_F, reads=(Kind.F,), cost="hop_forward"
    ),
    Kind.RECV_F: KindRow(Lane.RECV, direction=Direction.FORWARD, peer_kind=Kind.SEND_F, cost="hop_forward"),
    Kind.SEND_B: KindRow(
        Lane.SEND, direction=Direction.BACKWARD, peer_kind=Kind.RECV_B, reads=(Kind.B, Kind.I), cost="hop_backward"
    ),
    Kind.RECV_B: KindRow(Lane.RECV, direction=Direction.BACKWARD, peer_kind=Kind.SEND_B, cost="hop_backward"),
    # It reads the gradients that all backwards of its stage, or of one part, have added up. It runs together with the same op of the
    # other replicas and, with `Op.peer`, with the op of stage `peer` in this schedule; all of them get the sum.
    Kind.REDUCE_GRAD: KindRow(Lane.REDUCE, per_stage=True, peer_kind=Kind.REDUCE_GRAD, cost="reduce"),
}

# In each direction, a microbatch passes a stage by one of these sequences of ops; the first is the default. The first op reads
# a boundary tensor and writes the one for the next stage. After the last op of a backward the stage holds nothing of it.
PASS_SEQUENCES: Mapping[Direction, tuple[tuple[Kind, ...], ...]] = {
    Direction.FORWARD: ((Kind.F,),),
    Direction.BACKWARD: ((Kind.B,), (Kind.I, Kind.W)),
}
(FORWARD,) = PASS_SEQUENCES[Direction.FORWARD][0]  # the kind F
MESSAGE_LANES = (Lane.SEND, Lane.RECV)
COPY_LANES = (Lane.OFFLOAD, Lane.RELOAD)  # to the host, and back; copies run beside the ops that compute
# In these lanes an op may start once the op before it in its queue has started. The ops of a queue end in its order.
TRANSFER_LANES = (*MESSAGE_LANES, Lane.REDUCE)


def kinds_where(holds: Callable[[KindRow], bool]) -> frozenset[Kind]:
    """The kinds whose rows fulfil a condition."""
    return frozenset(kind for kind in Kind if holds(kind.row))


(RECOMPUTE,) = kinds_where(lambda row: Holding.RECOMPUTED_SET in row.allocates)

# The copy of a set to host memory, and the copy back.
(OFFLOAD,) = kinds_where(lambda row: Holding.HOST_SET in row.allocates)
(RELOAD,) = kinds_where(lambda row: Holding.HOST_SET in row.frees)

# All-reduces of gradients, once all of a stage's backwards have added theirs.
REDUCING = kinds_where(lambda row: row.per_stage and row.peer_kind is not None)

# All kinds of ops that may add to the gradients of a stage's parameters.
GIVES_GRADIENTS = frozenset(kind for way in PASS_SEQUENCES[Direction.BACKWARD] for kind in way)

# The kinds with which a split backward begins (I): the stage keeps what the rest needs.
SPLITTING = frozenset(way[0] for way in PASS_SEQUENCES[Direction.BACKWARD] if way[1:])

# The kinds after the first of a backward (W): no other stage waits for them, as the gradient of the input was sent before.
FINISHING = frozenset(kind for way in PASS_SEQUENCES[Direction.BACKWARD] for kind in way[1:])
