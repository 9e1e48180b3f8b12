"""Messages between neighbouring stages on the CPU, over gloo.

Each stage edge and direction has a communicator of its own and a waiting thread on each end: a gloo send blocks until its
receive is posted, and a gloo transfer counts as complete only for who waits for it.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, Store

from pipetrain.group.courier import FOREVER, Courier, Transfer, finish
from pipetrain.group.failure import Monitor
from pipetrain.group.pair import Pair, break_off, is_broken, make_pair, make_ring, neighbours_in_ring
from pipetrain.schedule.op import Lane, Op
from pipetrain.transport.forms import Form, flat_bytes
from pipetrain.transport.lanes import Lanes

_TAG = 0
_SHORT_BYTES = 1 << 16
# Who has lost one of two others breaks the connection to find out which; whoever sees that must let the first say so.
_SETTLE_SECONDS = 0.5


class GlooEdges:
    """Makes the ends of the stage edges of one rank; `store` is that of its replica, `of_all` that of all ranks."""

    def __init__(self, store: Store, lanes: Lanes, monitor: Monitor, of_all: Store | None = None) -> None:
        self._store = store
        self._of_all = store if of_all is None else of_all
        self._lanes = lanes
        self._monitor = monitor
        self._reduces: _Reduces | None = None

    def inbound(self, edge: int, direction: str, place: int, peer: str) -> GlooInbound:
        return GlooInbound(self._meet(edge, direction, place), 1 - place, peer, self._lanes, self._monitor)

    def outbound(self, edge: int, direction: str, place: int, peer: str) -> GlooOutbound:
        return GlooOutbound(self._meet(edge, direction, place), 1 - place, peer, self._lanes, self._monitor)

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> GlooReducer:
        name = f"reduce/{'/'.join(map(str, ranks))}"
        ring = make_ring(self._of_all, name, place, len(ranks), self._monitor.timeout_seconds)
        if self._reduces is None:
            self._reduces = _Reduces(self._monitor)
        others = {other: self._monitor.named(ranks[other]) for other in neighbours_in_ring(place, len(ranks))}
        return GlooReducer(ring, others, peer, self._reduces, self._lanes)

    def _meet(self, edge: int, direction: str, place: int) -> Pair:
        return make_pair(self._store, f"edge/{edge}/{direction}", place, self._monitor.timeout_seconds)


class GlooInbound:
    """The receiving end of one stage edge and direction: `transport.Inbound`."""

    def __init__(self, pair: Pair, source: int, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._pair = pair
        self._source = source
        self._lanes = lanes
        self._courier = Courier(f"receive from {peer}", peer, monitor)

    def post(
        self,
        op: Op,
        form: Form | None,
        make_buffers: Callable[[Form], list[Tensor]],
        arrived: Callable[[Form, Callable[[], list[Tensor]]], None],
    ) -> None:
        def job() -> Callable[[], None]:
            start = time.perf_counter()
            known = receive_form(self._pair, self._source) if form is None else form
            tensors = make_buffers(known)
            self._receive(tensors or ([] if form is None else [_word()]))
            self._lanes.record(Lane.RECV, op, start, time.perf_counter())
            return lambda: arrived(known, lambda: tensors)

        self._courier.submit(str(op), job)

    def _receive(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            finish(self._pair.recv([flat_bytes(tensor)], self._source, _TAG))

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        break_off(self._pair, self._source)


class GlooOutbound:
    """The sending end of one stage edge and direction: `transport.Outbound`."""

    reads_later = False

    def __init__(self, pair: Pair, target: int, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._pair = pair
        self._target = target
        self._lanes = lanes
        self._courier = Courier(f"send to {peer}", peer, monitor)

    def send(
        self,
        op: Op,
        form: Form | None,
        tensors: list[Tensor],
        left: Callable[[], None],
        ready: Callable[[], None] | None = None,
    ) -> None:
        """`ready` is called on the courier's thread before the tensors are read, and returns when they may be."""
        called = time.perf_counter()
        # Bytes alone; of what takes longer to copy than to wake a thread, the computing thread does nothing.
        is_short = form is None and ready is None and sum(tensor.nbytes for tensor in tensors) <= _SHORT_BYTES
        short = self._begun(tensors) if is_short and len(tensors) <= 1 else None

        def job() -> Callable[[], None]:
            start = called
            if ready is not None:
                ready()
                start = time.perf_counter()
            if short is not None:
                finish(short())
            elif form is None:
                self._send(tensors or [_word()])
            else:
                send_form(self._pair, self._target, form)
                self._send(tensors)
            self._lanes.record(Lane.SEND, op, start, time.perf_counter())
            return left

        self._courier.submit(str(op), job)

    def _begun(self, tensors: list[Tensor]) -> Transfer:
        """The transfer of a message of one tensor, or none."""
        message = flat_bytes(*tensors) if tensors else _word()
        return self._courier.begun(functools.partial(self._pair.send, [message], self._target, _TAG))

    def _send(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            finish(self._pair.send([flat_bytes(tensor)], self._target, _TAG))

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        break_off(self._pair, self._target)


class _Reduces:
    """The thread on which a rank adds up: one, so that it ends in the order of the lane. `lost` is who was lost there."""

    def __init__(self, monitor: Monitor) -> None:
        self.lost = "another rank"
        self.courier = Courier("reduce", lambda: self.lost, monitor)


class GlooReducer:
    """One end of several ranks that add up gradients, in a ring: `transport.Reducer`. `others` are the two at its sides, by place, or the one."""

    def __init__(self, ring: Pair, others: Mapping[int, str], peer: str, reduces: _Reduces, lanes: Lanes) -> None:
        self.peer = peer
        self._ring = ring
        self._others = others
        self._reduces = reduces
        self._lanes = lanes
        self._options = AllreduceOptions()
        self._options.timeout = FOREVER

    def reduce(
        self,
        op: Op,
        tensors: list[Tensor],
        settle: Callable[[], None],
        ended: Callable[..., None],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`ready` is called on the courier's thread before the tensors are read, and returns when they may be."""

        def job() -> Callable[[], None]:
            ready()
            start = time.perf_counter()
            try:
                for tensor in tensors:
                    finish(self._ring.allreduce([tensor], self._options))
            except RuntimeError:
                self._reduces.lost = " or ".join(self._find_lost())
                raise
            settle()
            self._lanes.record(Lane.REDUCE, op, start, time.perf_counter())
            return ended

        self._reduces.courier.submit(str(op), job)

    def _find_lost(self) -> list[str]:
        """Of those at its sides, who is gone."""
        if len(self._others) == 1:
            return list(self._others.values())
        time.sleep(_SETTLE_SECONDS)
        return [name for other, name in self._others.items() if is_broken(self._ring, other)] or [
            *self._others.values()
        ]

    def close(self) -> None:
        self._reduces.courier.close()

    def abort(self) -> None:
        for other in self._others:
            break_off(self._ring, other)


def _word() -> Tensor:
    """What is sent where a message has no tensors: so that both ends go on together."""
    return torch.zeros(1, dtype=torch.uint8)


def receive_form(pair: Pair, source: int) -> Form:
    """The form that `send_form` sent; waits, so on the thread of a courier."""
    size = torch.empty(1, dtype=torch.int64)
    finish(pair.recv([size], source, _TAG))
    text = torch.empty(int(size), dtype=torch.uint8)
    finish(pair.recv([text], source, _TAG))
    form: Form = pickle.loads(text.numpy().tobytes())
    return form


def send_form(pair: Pair, target: int, form: Form) -> None:
    text = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
    for tensor in (torch.tensor([text.numel()]), text):
        finish(pair.send([tensor], target, _TAG))
