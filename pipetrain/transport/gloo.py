"""Messages between neighbouring stages on the CPU, over gloo.

Each stage edge and direction has a communicator of its own and a waiting thread on each end: a gloo send blocks until its
receive is posted, and a gloo transfer counts as complete only for who waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Store

from pipetrain.group.courier import Courier, finish
from pipetrain.group.failure import Monitor
from pipetrain.group.pair import Pair, break_off, make_pair
from pipetrain.schedule.op import Lane, Op
from pipetrain.transport.forms import Form, flat_bytes
from pipetrain.transport.lanes import Lanes

CPU = torch.device("cpu")
_TAG = 0


class GlooEdges:
    """Makes the ends of the stage edges of one rank."""

    def __init__(self, store: Store, lanes: Lanes, monitor: Monitor) -> None:
        self._store = store
        self._lanes = lanes
        self._monitor = monitor

    def inbound(self, edge: int, direction: str, place: int, peer: str) -> GlooInbound:
        return GlooInbound(self._meet(edge, direction, place), 1 - place, peer, self._lanes, self._monitor)

    def outbound(self, edge: int, direction: str, place: int, peer: str) -> GlooOutbound:
        return GlooOutbound(self._meet(edge, direction, place), 1 - place, peer, self._lanes, self._monitor)

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
            for tensor in tensors:
                finish(self._pair.recv([flat_bytes(tensor)], self._source, _TAG))
            self._lanes.record(Lane.RECV, op, start, time.perf_counter())
            return lambda: arrived(known, lambda: tensors)

        self._courier.submit(str(op), job)

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        break_off(self._pair, self._source)


class GlooOutbound:
    """The sending end of one stage edge and direction: `transport.Outbound`."""

    def __init__(self, pair: Pair, target: int, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._pair = pair
        self._target = target
        self._lanes = lanes
        self._courier = Courier(f"send to {peer}", peer, monitor)

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Callable[[], None]) -> None:
        start = time.perf_counter()

        def job() -> Callable[[], None]:
            if form is not None:
                send_form(self._pair, self._target, form)
            for tensor in tensors:
                finish(self._pair.send([flat_bytes(tensor)], self._target, _TAG))
            self._lanes.record(Lane.SEND, op, start, time.perf_counter())
            return left

        self._courier.submit(str(op), job)

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        break_off(self._pair, self._target)


def receive_form(pair: Pair, source: int) -> Form:
    """The form that `send_form` sent; waits, so on the thread of a courier."""
    size = torch.empty(1, dtype=torch.int64)
    finish(pair.recv([size], source, _TAG))
    text = torch.empty(int(size), dtype=torch.uint8)
    finish(pair.recv([text], source, _TAG))
    return Form.from_json(bytes(text.tolist()))


def send_form(pair: Pair, target: int, form: Form) -> None:
    text = torch.frombuffer(bytearray(form.to_json()), dtype=torch.uint8)
    for tensor in (torch.tensor([text.numel()]), text):
        finish(pair.send([tensor], target, _TAG))
