"""All messages of one rank between stages: posted, sent and taken by op."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipetrain.group.failure import Monitor
from pipetrain.schedule.op import Kind, Op
from pipetrain.stage.meter import ActivationMeter
from pipetrain.transport.forms import Form, TensorForm, compact, conform, form_of, unpack

Collect = Callable[[], list[Tensor]]


class Inbound(Protocol):
    """The receiving end of one stage edge and direction: a queue of messages in the order of the sender's."""

    peer: str
    storages: set[int]

    def post(self, op: Op, form: Form | None, arrived: Callable[[Form, Collect], None]) -> None:
        """Receive the next message: of a known `form`, or with its form in front.

        `arrived(form, collect)` is called, perhaps on another thread, when F or B of `op` may start; `collect()` gives the
        tensors, on the lane that uses them.
        """

    def close(self) -> None:
        """Everything has been sent and received."""

    def abort(self) -> None:
        """The step has failed: break the connection, so that nobody waits on it."""


class Outbound(Protocol):
    """The sending end of one stage edge and direction."""

    peer: str

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Callable[[], None]) -> None:
        """Send one message, with its form in front if given. `left()` is called, perhaps on another thread, when the
        tensors need no longer be held."""

    def close(self) -> None:
        """Everything has been sent and received."""

    def abort(self) -> None:
        """The step has failed: break the connection, so that nobody waits on it."""


class Edges(Protocol):
    """Makes the ends of stage edges. `place` is 0 on the rank of the edge's first stage and 1 on the other's."""

    def inbound(self, edge: int, direction: str, place: int, peer: str) -> Inbound: ...
    def outbound(self, edge: int, direction: str, place: int, peer: str) -> Outbound: ...


class Transport:
    """The ends of every stage edge of a rank, one per direction.

    A step that is `described` sends each message with its form in front, and both ends remember the form by op; a later
    step with the same forms sends the tensors' bytes alone.

    `edges` makes the ends: over gloo on a CPU, over NCCL on a GPU.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        rank: int,
        edges: Edges | None,
        monitor: Monitor,
        meter: ActivationMeter,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._monitor = monitor
        self._meter = meter
        self._device = device
        self._inbound: dict[tuple[int, Kind], Inbound] = {}  # by receiving stage
        self._outbound: dict[tuple[int, Kind], Outbound] = {}  # by sending stage
        self._arrived: dict[Op, tuple[Form, Collect]] = {}
        self._early: dict[Op, list[int]] = {}  # in the meter, from arrival to use
        self._unsent: set[Op] = set()
        self._forms: dict[Op, Form] = {}
        self._described = (True, True)
        self._done: set[Op] = set()
        if edges is not None:
            self._connect(stage_ranks, edges)

    def _connect(self, stage_ranks: Sequence[int], edges: Edges) -> None:
        """Meet the ranks at the other ends. Every rank goes through the edges in the same order, so none waits in a ring."""
        for edge, (low, high) in enumerate(itertools.pairwise(stage_ranks)):
            if low == high or self._rank not in (low, high):
                continue
            place = int(self._rank == high)
            peer = f"rank {low if place else high}"
            if place:
                self._inbound[edge + 1, Kind.RECV_F] = edges.inbound(edge, "F", place, peer)
                self._outbound[edge + 1, Kind.SEND_B] = edges.outbound(edge, "B", place, peer)
            else:
                self._outbound[edge, Kind.SEND_F] = edges.outbound(edge, "F", place, peer)
                self._inbound[edge, Kind.RECV_B] = edges.inbound(edge, "B", place, peer)

    def start_step(self, forms: dict[Op, Form], *, described: tuple[bool, bool], done: set[Op]) -> None:
        """`forms` are those of this kind of step: filled where `described` (over edges before, after), read elsewhere.

        Receives that have arrived are put into `done`.
        """
        assert not self._arrived
        assert not self._unsent
        self._forms, self._described, self._done = forms, described, done
        for end in self._inbound.values():
            end.storages.clear()

    def storages(self) -> set[int]:
        """Of the messages that came, or are coming, in this step."""
        return set().union(*(end.storages for end in self._inbound.values()))

    def _is_described(self, op: Op) -> bool:
        return self._described[op.kind in (Kind.SEND_F, Kind.RECV_B)]

    def post(self, op: Op) -> None:
        """Post a receive; it waits in its queue for those before it."""
        form = None if self._is_described(op) else self._forms[op]

        def arrived(found: Form, collect: Collect) -> None:
            # An input that has come early counts as an activation from now on; on a GPU, where `collect` may still have to
            # receive it, from its F.
            early = collect() if op.kind is Kind.RECV_F and self._device.type == "cpu" else ()
            self._early[op] = [self._meter.hold(tensor) for tensor in early]
            self._arrived[op] = (found, collect)
            self._forms[op] = found
            self._done.add(op)

        self._inbound[op.stage, op.kind].post(op, form, arrived)

    def take(self, op: Op) -> tuple[list[Any], Form]:
        """The leaves of a message that has arrived, and its form."""
        form, collect = self._arrived.pop(op)
        for key in self._early.pop(op):
            self._meter.release(key)
        return unpack(form, collect()), form

    def send(self, op: Op, leaves: Sequence[Any], wants_gradient: Sequence[bool], spec: str) -> None:
        """Send a message. The tensors count as activations until they have left, where they are outputs."""
        dense = [compact(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        form = form_of(leaves, dense, wants_gradient, spec)
        described = self._is_described(op)
        if described:
            self._forms[op] = form
        elif form != self._forms[op]:
            dense = conform(leaves, self._forms[op], form, self._device, f"rank {self._rank} in {op}")
        tensors = [leaf for leaf in dense if isinstance(leaf, Tensor)]
        keys = [self._meter.hold(tensor) for tensor in tensors] if op.kind is Kind.SEND_F else []
        self._unsent.add(op)

        def left() -> None:
            for key in keys:
                self._meter.release(key)
            tensors.clear()
            self._unsent.discard(op)

        self._outbound[op.stage, op.kind].send(op, form if described else None, tensors, left)

    def finish(self) -> None:
        """Wait until everything has left."""
        self._monitor.wait(lambda: not self._unsent, lambda: self.describe(min(self._unsent, key=str)))

    def describe(self, op: Op) -> str:
        """What a rank says that waits for a transfer."""
        if op.kind in (Kind.RECV_F, Kind.RECV_B):
            return f"rank {self._rank} waits in {op} from {self._inbound[op.stage, op.kind].peer}"
        return f"rank {self._rank} waits in {op} to {self._outbound[op.stage, op.kind].peer}"

    def disconnect(self, op: Op) -> None:
        """Break the connection that carries `op`; every connection of this rank where `op` is no message of it."""
        key = (op.stage, op.kind)
        end = self._inbound.get(key) or self._outbound.get(key)
        for one in [end] if end is not None else self._ends():
            one.abort()

    def _ends(self) -> list[Inbound | Outbound]:
        return [*self._inbound.values(), *self._outbound.values()]

    def close(self) -> None:
        for end in self._ends():
            end.close()

    def abort(self) -> None:
        """A step has failed: break every connection, so that nobody waits on this rank."""
        for end in self._ends():
            end.abort()


def wanted(form: Form) -> frozenset[int]:
    """The leaves of a received message that need a gradient."""
    return frozenset(n for n, leaf in enumerate(form.leaves) if isinstance(leaf, TensorForm) and leaf.needs_gradient)
