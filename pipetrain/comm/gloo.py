"""Messages between neighbouring stages on the CPU, over gloo: a communicator per stage edge and direction, a waiting thread per end.

A gloo send blocks until its receive is posted, and a transfer counts as complete only for who waits for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, Store

from pipetrain.comm.courier import FOREVER, Courier, Pair, Transfer, break_off, finish, make_pair
from pipetrain.comm.ends import Arrived, Ended, MakeBuffers
from pipetrain.comm.failure import Monitor
from pipetrain.comm.forms import Form, flat_bytes
from pipetrain.comm.lanes import Lanes
from pipetrain.schedule.op import Lane, Op

_TAG = 0
_SHORT_BYTES = 1 << 16
# A rank that lost a neighbour breaks its connections to see which one; others wait a bit, so that it says so first.
_SETTLE_SECONDS = 0.5
_PATIENCE_SECONDS = 0.05


class GlooEnd:
    """Either end of one stage edge and direction: `ends.MessageEnd`."""

    reads_later = False

    def __init__(self, pair: Pair, other: int, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        """`other` is the place of `peer` in the pair."""
        self.peer = peer
        self._pair = pair
        self._other = other
        self._lanes = lanes
        self._courier = Courier(f"messages with {peer}", peer, monitor)
        self.close = self._courier.close

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        def job() -> Ended:
            start = time.perf_counter()
            known = receive_form(self._pair, self._other) if form is None else form
            tensors = make_buffers(known)
            for tensor in tensors or ([] if form is None else [_word()]):
                finish(self._pair.recv([flat_bytes(tensor)], self._other, _TAG))
            self._lanes.record(Lane.RECV, op, start, time.perf_counter())
            return lambda: arrived(known, lambda: tensors)

        self._courier.submit(str(op), job)

    def send(
        self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended, ready: Callable[[], None] | None = None
    ) -> None:
        """`ready` is called on the courier's thread before the tensors are read, and returns when they may be."""
        called = time.perf_counter()
        # Few bytes alone: to copy more would keep the computing thread longer than to wake another.
        is_short = form is None and ready is None and sum(tensor.nbytes for tensor in tensors) <= _SHORT_BYTES
        short = self._courier.begun(self._transfer(*tensors or [_word()])) if is_short and len(tensors) <= 1 else None

        def job() -> Ended:
            start = called
            if ready is not None:
                ready()
                start = time.perf_counter()
            if short is not None:
                finish(short())
            else:
                if form is not None:
                    send_form(self._pair, self._other, form)
                for tensor in tensors or ([_word()] if form is None else []):
                    finish(self._transfer(tensor)())
            self._lanes.record(Lane.SEND, op, start, time.perf_counter())
            return left

        self._courier.submit(str(op), job)

    def _transfer(self, tensor: Tensor) -> Transfer:
        return functools.partial(self._pair.send, [flat_bytes(tensor)], self._other, _TAG)

    def abort(self) -> None:
        break_off(self._pair, self._other)


class GlooReducer:
    """One end of several ranks that add up gradients, in a ring: `ends.Reducer`. `others` are the two at its sides, by place, or the one."""

    def __init__(
        self, ring: Pair, others: Mapping[int, str], peer: str, courier: Courier, lanes: Lanes, monitor: Monitor
    ) -> None:
        self.peer = peer
        self._ring = ring
        self._others = others
        self._courier = courier
        self._lanes = lanes
        self._monitor = monitor
        self.close = courier.close
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
            except RuntimeError as error:
                self._monitor.lost(str(op), " or ".join(self._find_lost()), error)
                raise
            settle()
            self._lanes.record(Lane.REDUCE, op, start, time.perf_counter())
            return ended

        self._courier.submit(str(op), job)

    def _find_lost(self) -> list[str]:
        """Of those at its sides, who is gone."""
        if len(self._others) == 1:
            return list(self._others.values())
        time.sleep(_SETTLE_SECONDS)
        lost = [name for other, name in self._others.items() if break_off(self._ring, other, _PATIENCE_SECONDS)]
        return lost or [*self._others.values()]

    def abort(self) -> None:
        for other in self._others:
            break_off(self._ring, other)


class GlooEdges:
    """Makes the ends of the stage edges of one rank; `store` is that of its replica, `of_all` that of all ranks."""

    _end: type[GlooEnd] = GlooEnd
    _reducer: type[GlooReducer] = GlooReducer

    def __init__(self, store: Store, of_all: Store, lanes: Lanes, monitor: Monitor) -> None:
        self._store = store
        self._of_all = of_all
        self._lanes = lanes
        self._monitor = monitor
        self._reduces: Courier | None = (
            None  # the one thread on which a rank sums gradients, so that sums end in the lane's order
        )

    def end(self, edge: int, direction: str, place: int, peer: str) -> GlooEnd:
        pair = make_pair(self._store, f"edge/{edge}/{direction}", place, peer, self._monitor)
        return self._end(pair, 1 - place, peer, self._lanes, self._monitor)

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> GlooReducer:
        name = f"reduce/{'/'.join(map(str, ranks))}"
        ring = make_pair(self._of_all, name, place, peer, self._monitor, len(ranks))
        if self._reduces is None:
            self._reduces = Courier("reduce", "another rank", self._monitor)
        sides = sorted({(place - 1) % len(ranks), (place + 1) % len(ranks)})
        others = {other: self._monitor.named(ranks[other]) for other in sides}
        return self._reducer(ring, others, peer, self._reduces, self._lanes, self._monitor)


def _word() -> Tensor:
    """What is sent where a message has no tensors: so that both ends go on together."""
    return torch.zeros(1, dtype=torch.uint8)


def receive_form(pair: Pair, source: int) -> Form:
    """The form that `send_form` sent; waits, so on the thread of a courier."""
    size = torch.empty(1, dtype=torch.int64)
    finish(pair.recv([size], source, _TAG))
    text = torch.empty(int(size), dtype=torch.uint8)
    finish(pair.recv([text], source, _TAG))
    return Form.from_json(text.numpy().tobytes())


def send_form(pair: Pair, target: int, form: Form) -> None:
    text = torch.frombuffer(bytearray(form.to_json()), dtype=torch.uint8)
    for tensor in (torch.tensor([text.numel()]), text):
        finish(pair.send([tensor], target, _TAG))
