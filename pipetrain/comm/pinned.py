"""Messages between stages on GPUs through memory of the host, over gloo: where NCCL does not connect the ranks, or they share a GPU.

    SEND   the thread that launches   [1] wait for the producer (the executor's `on`)  [2] copy to a slot  [3] record its end
           the courier                wait for [3], send the slot; then it is free
    RECV   the courier                receive into a slot that is free
           the thread that launches   [1] the RECV's stream  [2] copy to the device  [3] record the arrival: then it is free

A slot is a piece of host memory that the device reads and writes while the host goes on ("pinned"). One thread launches all
that the device does, so no stream is given work by two, and what waits for a RECV finds its event recorded. The host waits
for each message to arrive, and not only for its forms: so the host does not run ahead of the device as it does over NCCL.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipetrain.comm.device import Device
from pipetrain.comm.ends import Arrived, Collect, Ended, MakeBuffers
from pipetrain.comm.failure import Monitor, PipelineError
from pipetrain.comm.forms import Form, flat_bytes
from pipetrain.comm.gloo import GlooEdges, GlooEnd, GlooReducer
from pipetrain.schedule.op import Lane, Op

_META = torch.device("meta")
_NUM_SLOTS = 2  # of a receiving end: one being received into, one being copied to the device
_ALIGNMENT = 16  # bytes; the largest entry of a tensor (complex128)
# How often a courier looks for an event: a message takes longer, and a thread inside a wait of CUDA's could not be ended.
_POLL_SECONDS = 1e-4


class PinnedEnd(GlooEnd):
    """Either end of one stage edge and direction, between slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        device = self.lanes.device
        self._sending = _SendingSlots(device, self.monitor)
        self._receiving = itertools.cycle([_ReceivingSlot(device, self.monitor) for _ in range(_NUM_SLOTS)])

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        slot = next(self._receiving)

        def came(known: Form, collect: Collect, _: Callable[[], None] = lambda: None, /) -> None:
            in_slot, tensors = collect(), list[Tensor]()
            slot.is_free = lambda: False  # what has come is not on its way to the device yet

            def land() -> None:
                with self.lanes.on(Lane.RECV, (), op):
                    tensors.extend(make_buffers(known))
                    for tensor, source in zip(tensors, in_slot):
                        self.lanes.device.copy(flat_bytes(tensor), source)  # [2]
                    read = self.lanes.mark(Lane.RECV, op)  # [3]
                slot.is_free = lambda: self.lanes.device.has_ended(read)

            arrived(known, lambda: tensors, land)

        super().post(op, form, slot.tensors, came)

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended) -> None:  # type: ignore[override]
        slot, in_slot, ready = self._sending.fill(tensors)

        def sent() -> None:
            self._sending.free.append(slot)
            left()

        super().send(op, form, in_slot, sent, ready)


class PinnedReducer(GlooReducer):
    """One end of several ranks that add up gradients. The host adds them up, in a slot."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slots = _SendingSlots(self.lanes.device, self.monitor)

    def reduce(  # type: ignore[override]
        self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]
    ) -> None:
        slot, in_slot, ready = self._slots.fill(tensors)

        def land() -> None:
            with self.lanes.on(Lane.REDUCE, (), op):
                for tensor, source in zip(tensors, in_slot):
                    self.lanes.device.copy(flat_bytes(tensor), source)
                settle()
                self.lanes.mark(Lane.REDUCE, op)
            self._slots.free.append(slot)  # what is copied into it next comes behind this, on the same stream

        super().reduce(op, in_slot, lambda: None, lambda: ended(land), ready)


class PinnedEdges(GlooEdges):
    """Makes the ends of the stage edges of one rank."""

    _end = PinnedEnd
    _reducer = PinnedReducer


class _Slot:
    """Host memory for one message; it grows with the largest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.host_memory(0)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room for each of `tensors`, in one dimension as `flat_bytes` gives it."""
        ends = list(itertools.accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors))
        if ends and ends[-1] > len(self._memory):
            self._memory = self._device.host_memory(ends[-1])
        return [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype) for start, tensor in zip((0, *ends), tensors)
        ]


@dataclass(eq=False)
class _SendingSlots:
    """As many slots as messages were unsent at a time; `free`: their messages have left."""

    device: Device
    monitor: Monitor
    free: deque[_Slot] = field(default_factory=deque, init=False)

    def fill(self, tensors: Sequence[Tensor]) -> tuple[_Slot, list[Tensor], Callable[[], None]]:
        """A slot with copies of `tensors`, the copies, and what a courier calls to wait for them."""
        slot = self.free.popleft() if self.free else _Slot(self.device)
        in_slot = slot.like(tensors)
        for target, tensor in zip(in_slot, tensors):
            self.device.copy(target, flat_bytes(tensor))  # [2] on the queue's own stream
        copied = self.device.record(self.device.current())  # [3]
        return slot, in_slot, lambda: _wait(lambda: self.device.has_ended(copied), self.monitor)


class _ReceivingSlot(_Slot):
    """One that is received into again when the device has read what came before: when it `is_free()`."""

    def __init__(self, device: Device, monitor: Monitor) -> None:
        super().__init__(device)
        self._monitor = monitor
        self.is_free: Callable[[], bool] = lambda: True

    def tensors(self, form: Form) -> list[Tensor]:
        """Buffers for a message of this form. Waits until the slot is free: so on the thread of a courier."""
        _wait(lambda: self.is_free(), self._monitor)
        return self.like([leaf.empty(_META) for leaf in form.tensors])


def _wait(is_over: Callable[[], bool], monitor: Monitor) -> None:
    """Wait on the thread of a courier; whoever waits for its message has a time-out.

    Raises PipelineError: the pipeline has failed meanwhile.
    """
    while not is_over():
        if monitor.failure is not None:
            raise PipelineError(f"the pipeline failed: {monitor.failure}")
        time.sleep(_POLL_SECONDS)
