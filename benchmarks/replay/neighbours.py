"""Neighbours that are not there: messages come when the simulator says, by real copies between host and device memory.

These are the ends of edges that the transport of one rank gets instead of gloo's or NCCL's. A receive is over at the time
that the simulation gives, or a hop after it was posted where that is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipetrain.comm.courier import Courier
from pipetrain.comm.failure import Monitor
from pipetrain.comm.forms import Form, TensorForm
from pipetrain.comm.lanes import Lanes
from pipetrain.schedule.op import Lane, Op


class Clock:
    """The simulation's zero on this machine's clock, set when a step starts."""

    def __init__(self) -> None:
        self.zero = 0.0

    def start(self) -> None:
        self.zero = time.perf_counter()

    def sleep_until(self, seconds: float) -> None:
        left = self.zero + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


class ReplayEdges:
    """Makes the ends: `arrivals[op]` is when a RECV ends, in seconds from the start of the step; `hop` how long it takes."""

    def __init__(
        self,
        arrivals: Mapping[Op, float],
        hop: float,
        clock: Clock,
        lanes: Lanes,
        monitor: Monitor,
        device: torch.device,
    ) -> None:
        self._arrivals = arrivals
        self._hop = hop
        self._clock = clock
        self._lanes = lanes
        self._monitor = monitor
        self._pinned = device.type == "cuda"

    def end(self, edge: int, direction: str, place: int, peer: str) -> ReplayEnd:  # noqa: ARG002
        courier = Courier(f"edge {edge} {direction}", peer, self._monitor)
        return ReplayEnd(peer, courier, self._arrivals, self._hop, self._clock, self._lanes, self._pinned)


class ReplayEnd:
    """A queue of messages that come from pinned host memory, or go there: `ends.MessageEnd`."""

    reads_later = False

    def __init__(
        self,
        peer: str,
        courier: Courier,
        arrivals: Mapping[Op, float],
        hop: float,
        clock: Clock,
        lanes: Lanes,
        pinned: bool,
    ) -> None:
        self.peer = peer
        self._courier = courier
        self._arrivals = arrivals
        self._hop = hop
        self._clock = clock
        self._lanes = lanes
        self._pinned = pinned
        self._sources: dict[Form, list[Tensor]] = {}
        self._targets: dict[torch.Size, Tensor] = {}

    def post(
        self,
        op: Op,
        form: Form | None,
        make_buffers: Callable[[Form], list[Tensor]],
        arrived: Callable[[Form, Callable[[], list[Tensor]]], None],
    ) -> None:
        assert form is not None, "a replay knows all forms"
        device = self._lanes.device
        stream = device.current()  # the lane's
        tensors = make_buffers(form)  # on this thread, which launches

        def job() -> Callable[[], None]:
            start = time.perf_counter()
            with device.on(stream):
                self._clock.sleep_until(max(self._arrivals[op] - self._hop, start - self._clock.zero))
                for tensor, source in zip(tensors, self._of(form)):
                    tensor.copy_(source, non_blocking=True)
            device.finish(stream)
            self._clock.sleep_until(max(self._arrivals[op], start - self._clock.zero + self._hop))
            self._lanes.record(Lane.RECV, op, start, time.perf_counter())
            return lambda: arrived(form, lambda: tensors)

        self._courier.submit(str(op), job)

    def _of(self, form: Form) -> list[Tensor]:
        """What comes: small random numbers, drawn once."""
        if form not in self._sources:
            generator = torch.Generator().manual_seed(0)
            drawn = [
                torch.randn(leaf.shape, generator=generator).to(leaf.dtype) * 1e-2
                for leaf in form.leaves
                if isinstance(leaf, TensorForm)
            ]
            self._sources[form] = [tensor.pin_memory() for tensor in drawn] if self._pinned else drawn
        return self._sources[form]

    def send(
        self,
        op: Op,
        form: Form | None,
        tensors: list[Tensor],
        left: Callable[[], None],
    ) -> None:
        assert form is None, "a replay knows all forms"
        start = time.perf_counter()
        device = self._lanes.device
        stream = device.current()  # [1] the lane's, which waits for the producer's end: the executor's `on`

        def job() -> Callable[[], None]:
            with device.on(stream):
                for tensor in tensors:
                    self._target(tensor).copy_(tensor, non_blocking=True)  # [2]
            device.finish(stream)  # [3] on this thread: the tensors are held until here
            self._lanes.record(Lane.SEND, op, start, time.perf_counter())
            return left

        self._courier.submit(str(op), job)

    def _target(self, tensor: Tensor) -> Tensor:
        if tensor.shape not in self._targets:
            self._targets[tensor.shape] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        return self._targets[tensor.shape]

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        """There is no connection to break."""
