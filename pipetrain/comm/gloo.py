"""Messages between neighbouring stages on the CPU, over gloo: a communicator per stage edge and direction, a waiting thread per end.

A gloo send blocks until its receive is posted, and a transfer counts as complete only for who waits for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(eq=False)
class GlooEnd:
    """Either end of one stage edge and direction: `ends.MessageEnd`."""

    reads_later = False
    pair: Pair
    other: int  # the place of `peer` in the pair
    peer: str
    lanes: Lanes
    monitor: Monitor

    def __post_init__(self) -> None:
        self.courier = Courier(f"messages with {self.peer}", self.peer, self.monitor)
        self.close = self.courier.close

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        def job() -> Ended:
            start = time.perf_counter()
            known = receive_form(self.pair, self.other) if form is None else form
            tensors = make_buffers(known)
            for tensor in tensors or ([] if form is None else [_word()]):
                finish(self.pair.recv([flat_bytes(tensor)], self.other, _TAG))
            self.lanes.record(Lane.RECV, op, start, time.perf_counter())
            return lambda: arrived(known, lambda: tensors)

        self.courier.submit(str(op), job)

    def send(
        self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended, ready: Callable[[], None] | None = None
    ) -> None:
        """`ready` is called on the courier's thread before the tensors are read, and returns when they may be."""
        called = time.perf_counter()
        # Few bytes alone: to copy more would keep the computing thread longer than to wake another.
        is_short = form is None and ready is None and sum(tensor.nbytes for tensor in tensors) <= _SHORT_BYTES
        transfers: list[Transfer] = [
            functools.partial(self.pair.send, [flat_bytes(tensor)], self.other, _TAG)
            for tensor in tensors or ([_word()] if form is None else [])
        ]
        if is_short and len(transfers) == 1:
            transfers = [self.courier.begun(transfers[0])]

        def job() -> Ended:
            start = called
            if ready is not None:
                ready()
                start = time.perf_counter()
            if form is not None:
                send_form(self.pair, self.other, form)
            for transfer in transfers:
                finish(transfer())
            transfers.clear()  # they hold the tensors
            self.lanes.record(Lane.SEND, op, start, time.perf_counter())
            return left

        self.courier.submit(str(op), job)

    def abort(self) -> None:
        break_off(self.pair, self.other)


@dataclass(eq=False)
class GlooReducer:
    """One end of several ranks that add up gradients, in a ring: `ends.Reducer`. `others` are the two at its sides, by place, or the one."""

    ring: Pair
    others: Mapping[int, str]
    peer: str
    courier: Courier
    lanes: Lanes
    monitor: Monitor

    def __post_init__(self) -> None:
        self.close = self.courier.close
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
                    finish(self.ring.allreduce([tensor], self._options))
            except RuntimeError as error:
                self.monitor.lost(str(op), " or ".join(self._find_lost()), error)
                raise
            settle()
            self.lanes.record(Lane.REDUCE, op, start, time.perf_counter())
            return ended

        self.courier.submit(str(op), job)

    def _find_lost(self) -> list[str]:
        """Of those at its sides, who is gone."""
        if len(self.others) == 1:
            return list(self.others.values())
        time.sleep(_SETTLE_SECONDS)
        lost = [name for other, name in self.others.items() if break_off(self.ring, other, _PATIENCE_SECONDS)]
        return lost or [*self.others.values()]

    def abort(self) -> None:
        for other in self.others:
            break_off(self.ring, other)


@dataclass(eq=False)
class GlooEdges:
    """Makes the ends of the stage edges of one rank; `store` is that of its replica, `of_all` that of all ranks."""

    store: Store
    of_all: Store
    lanes: Lanes
    monitor: Monitor
    _end: ClassVar[type[GlooEnd]] = GlooEnd
    _reducer: ClassVar[type[GlooReducer]] = GlooReducer

    @functools.cached_property
    def _reduces(self) -> Courier:
        # One thread on which a rank sums gradients, so that sums end in the lane's order.
        return Courier("reduce", "another rank", self.monitor)

    def end(self, edge: int, direction: str, place: int, peer: str) -> GlooEnd:
        pair = make_pair(self.store, f"edge/{edge}/{direction}", place, peer, self.monitor)
        return self._end(pair, 1 - place, peer, self.lanes, self.monitor)

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> GlooReducer:
        name = f"reduce/{'/'.join(map(str, ranks))}"
        ring = make_pair(self.of_all, name, place, peer, self.monitor, len(ranks))
        sides = sorted({(place - 1) % len(ranks), (place + 1) % len(ranks)})
        others = {other: self.monitor.named(ranks[other]) for other in sides}
        return self._reducer(ring, others, peer, self._reduces, self.lanes, self.monitor)


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
