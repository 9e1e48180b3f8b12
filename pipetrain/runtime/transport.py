"""All messages of one rank between stages: posted, sent and taken by op."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from pipetrain.runtime.failure import Monitor
from pipetrain.runtime.forms import Form, TensorForm, compact, conform, form_of, unpack
from pipetrain.runtime.gloo import GlooInbound, GlooOutbound, make_pair
from pipetrain.runtime.meter import ActivationMeter
from pipetrain.schedule.op import Kind, Lane, Op

Recorder = Callable[[Lane, Op, float, float], None]


class Transport:
    """The ends of every stage edge of a rank, one per direction.

    A step that is `described` sends each message with its form in front, and both ends remember the form by op; a later
    step with the same forms sends the tensors' bytes alone.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        rank: int,
        store: Store | None,
        monitor: Monitor,
        meter: ActivationMeter,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._monitor = monitor
        self._meter = meter
        self._device = device
        self._inbound: dict[tuple[int, Kind], GlooInbound] = {}  # by receiving stage
        self._outbound: dict[tuple[int, Kind], GlooOutbound] = {}  # by sending stage
        self._arrived: dict[Op, tuple[Form, list[Tensor]]] = {}
        self._unsent: set[Op] = set()
        self._forms: dict[Op, Form] = {}
        self._described = (True, True)
        self._record: Recorder = _ignore
        self._done: set[Op] = set()
        if store is not None:
            self._connect(stage_ranks, store)

    def _connect(self, stage_ranks: Sequence[int], store: Store) -> None:
        """Meet the ranks at the other ends. Every rank goes through the edges in the same order, so none waits in a ring."""
        for edge, (low, high) in enumerate(itertools.pairwise(stage_ranks)):
            if low == high or self._rank not in (low, high):
                continue
            place = int(self._rank == high)
            peer = f"rank {low if place else high}"
            for direction, receiver in (("F", 1), ("B", 0)):
                pair = make_pair(store, f"edge/{edge}/{direction}", place, self._monitor.timeout_seconds)
                name = f"edge {edge} {direction}"
                if place == receiver:
                    key = (edge + 1, Kind.RECV_F) if direction == "F" else (edge, Kind.RECV_B)
                    self._inbound[key] = GlooInbound(pair, 1 - place, name, peer, self._monitor)
                else:
                    key = (edge, Kind.SEND_F) if direction == "F" else (edge + 1, Kind.SEND_B)
                    self._outbound[key] = GlooOutbound(pair, 1 - place, name, peer, self._monitor)

    def start_step(
        self, forms: dict[Op, Form], *, described: tuple[bool, bool], record: Recorder, done: set[Op]
    ) -> None:
        """`forms` are those of this kind of step: filled where `described` (over edges before, after), read elsewhere.

        Receives that have arrived are put into `done`.
        """
        assert not self._arrived
        assert not self._unsent
        self._forms, self._described, self._record, self._done = forms, described, record, done
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

        def publish(found: Form, tensors: list[Tensor], start: float, end: float) -> None:
            self._arrived[op] = (found, tensors)
            self._forms[op] = found
            self._record(Lane.RECV, op, start, end)
            self._done.add(op)

        self._inbound[op.stage, op.kind].post(str(op), form, publish)

    def take(self, op: Op) -> tuple[list[Any], Form]:
        """The leaves of a message that has arrived, and its form."""
        form, tensors = self._arrived.pop(op)
        return unpack(form, tensors), form

    def send(self, op: Op, leaves: Sequence[Any], wants_gradient: Sequence[bool], spec: str) -> None:
        """Send a message. The tensors count as activations until they have left, where they are outputs."""
        start = time.perf_counter()
        dense = [compact(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        form = form_of(leaves, dense, wants_gradient, spec)
        described = self._is_described(op)
        if described:
            self._forms[op] = form
        elif form != self._forms[op]:
            dense = conform(leaves, self._forms[op], form, self._device, str(op))
        tensors = [leaf for leaf in dense if isinstance(leaf, Tensor)]
        keys = [self._meter.hold(tensor) for tensor in tensors] if op.kind is Kind.SEND_F else []
        self._unsent.add(op)

        def publish(end: float) -> None:
            for key in keys:
                self._meter.release(key)
            tensors.clear()
            self._record(Lane.SEND, op, start, end)
            self._unsent.discard(op)

        self._outbound[op.stage, op.kind].send(str(op), form if described else None, tensors, publish)

    def finish(self) -> None:
        """Wait until everything has left."""
        self._monitor.wait(lambda: not self._unsent, lambda: self.describe(min(self._unsent, key=str)))

    def describe(self, op: Op) -> str:
        """What a rank says that waits for a transfer."""
        if op.kind in (Kind.RECV_F, Kind.RECV_B):
            return f"rank {self._rank} waits in {op} from {self._inbound[op.stage, op.kind].peer}"
        return f"rank {self._rank} waits in {op} to {self._outbound[op.stage, op.kind].peer}"

    def close(self) -> None:
        for inbound in self._inbound.values():
            inbound.close()
        for outbound in self._outbound.values():
            outbound.close()


def wanted(form: Form) -> frozenset[int]:
    """The leaves of a received message that need a gradient."""
    return frozenset(n for n, leaf in enumerate(form.leaves) if isinstance(leaf, TensorForm) and leaf.needs_gradient)


def _ignore(lane: Lane, op: Op, start: float, end: float) -> None:
    """Before the first step there is nothing to record."""
