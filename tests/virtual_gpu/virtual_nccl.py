"""A stand-in for torch's `ProcessGroupNCCL`: transfers meet in the order of their communicator's stream.

As torch does it: the communicator's stream waits for the caller's, the transfer runs on it, and `wait` lets the caller's
current stream wait for its end. The virtual host never waits. What a receive is given comes when somebody first reads it,
because values are computed at once here: only then does the thread wait until its peer has launched the send.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from virtual_gpu.baton import Baton
from virtual_gpu.recorded import Message
from virtual_gpu.virtual_device import VirtualDevice, VirtualEvent

PATIENCE_SECONDS = 60.0
_numbers = itertools.count()


class DeadEnd(AssertionError):
    """A rank reads a message that nobody has launched for a long time."""


class Wire:
    """The messages of one direction of a communicator."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._condition = threading.Condition()
        self._messages: dict[int, Tensor] = {}
        self._broken = False
        self.num_sent = self.num_posted = 0

    def put(self, number: int, tensor: Tensor) -> None:
        with self._condition:
            self._messages[number] = tensor
            self._condition.notify_all()

    def take(self, number: int, what: str) -> Tensor:
        with self._baton.passed_on(), self._condition:
            came = self._condition.wait_for(lambda: number in self._messages or self._broken, PATIENCE_SECONDS)
        if not came or self._broken:
            raise DeadEnd(
                f"{what}: message {number} was not sent within {PATIENCE_SECONDS:g} s, or its end was broken off"
            )
        return self._messages.pop(number)

    def cut(self) -> None:
        with self._condition:
            self._broken = True
            self._condition.notify_all()


class Wires:
    """Of all communicators of a run, by their number and the place that sends."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._lock = threading.Lock()
        self._wires: dict[tuple[int, int], Wire] = {}

    def of(self, communicator: int, sender: int) -> Wire:
        with self._lock:
            return self._wires.setdefault((communicator, sender), Wire(self._baton))


@dataclass
class _Options:
    config: SimpleNamespace = field(default_factory=SimpleNamespace)
    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(0)


class VirtualWork:
    def __init__(self, device: VirtualDevice, end: VirtualEvent, tensors: list[Tensor]) -> None:
        self._device = device
        self._end = end
        self._stash = tensors  # as torch: until somebody has waited

    def wait(self, _: timedelta | None = None) -> bool:
        self._device.wait(self._device.current(), self._end)
        self._stash = []
        return True


class VirtualGroup:
    """`ProcessGroupNCCL` of two ranks, for the device of the thread that makes it."""

    Options = _Options

    def __init__(self, device: VirtualDevice, wires: Wires, store: Any, place: int, options: _Options) -> None:
        self._device = device
        self._place = place
        # Both ends agree over the store: the first to come has named the communicator.
        self._number = int(store.compare_set("virtual communicator", "", str(next(_numbers))).decode())
        self._wires = wires
        self._stream = device.own_stream(f"communicator {self._number}")
        self.options = options
        self.is_closed = False

    def send(self, tensors: list[Tensor], target: int, tag: int) -> VirtualWork:  # noqa: ARG002
        (tensor,) = tensors
        wire = self._wires.of(self._number, self._place)
        number, wire.num_sent = wire.num_sent, wire.num_sent + 1
        block = self._device.block(tensor)
        with self._device.unrecorded():
            self._device.blocks.fill(block, tensor)
            wire.put(number, tensor.detach().clone())
        return self._launch(
            Message(self._stream.number, (self._number, self._place), number, sends=True, block=block), tensor=tensor
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> VirtualWork:  # noqa: ARG002
        (tensor,) = tensors
        wire = self._wires.of(self._number, source)
        number, wire.num_posted = wire.num_posted, wire.num_posted + 1
        block = self._device.block(tensor)
        what = f"rank {self._device.recording.rank} reads what {self._device.launches} brings"
        self._device.blocks.fill_later(block, tensor, lambda: wire.take(number, what))
        return self._launch(
            Message(self._stream.number, (self._number, source), number, sends=False, block=block), tensor=tensor
        )

    def allreduce(self, tensors: list[Tensor], options: Any) -> VirtualWork:  # noqa: ARG002
        """Of two ranks: what 0 has goes over, then what 1 has; each adds it to its own."""
        (tensor,) = tensors
        own, others = (self._wires.of(self._number, place) for place in (self._place, 1 - self._place))
        sent, own.num_sent = own.num_sent, own.num_sent + 1
        came, others.num_posted = others.num_posted, others.num_posted + 1
        block = self._device.block(tensor)
        what = f"rank {self._device.recording.rank} reads what {self._device.launches} adds up"
        with self._device.unrecorded():
            self._device.blocks.fill(block, tensor)
            given = tensor.detach().clone().flatten()
            own.put(sent, given)
        self._device.blocks.fill_later(block, tensor, lambda: given + others.take(came, what))
        ways = (
            Message(self._stream.number, (self._number, self._place), sent, sends=True, block=block),
            Message(self._stream.number, (self._number, 1 - self._place), came, sends=False, block=block),
        )
        return self._launch(*(ways if self._place == 0 else reversed(ways)), tensor=tensor)

    def _launch(self, *messages: Message, tensor: Tensor) -> VirtualWork:
        device = self._device
        device.follow(self._stream, device.current())
        device.recording.entries.extend(messages)
        if not device.blocks.is_lent(tensor):  # torch does so with every tensor of a transfer
            device.keep(tensor, self._stream)
        return VirtualWork(device, device.record(self._stream), [tensor])

    def abort(self) -> None:
        self.is_closed = True
        for sender in (0, 1):
            self._wires.of(self._number, sender).cut()

    def shutdown(self) -> None:
        self.is_closed = True
