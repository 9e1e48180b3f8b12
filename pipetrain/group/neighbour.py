"""One neighbouring rank on the chain: labelled messages of any size, in both directions."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch

from pipetrain.group.courier import Courier, Transfer, finish
from pipetrain.group.failure import Monitor, PipelineError
from pipetrain.group.pair import Pair, break_off

# Every message begins with a frame of this size, whatever it is: two ranks that call different methods then still understand
# each other well enough to say so, where gloo would abort on different sizes.
_FRAME_BYTES = 1024
_HEAD = struct.Struct("<QH")  # bytes of data, bytes of the label
_TAG = 0
# A rank that runs ahead of its neighbour waits then, and does not pile up messages.
_MOST_UNSENT = 4


class Neighbour:
    """One neighbouring rank: host messages in both directions, in order, each direction on a thread of its own."""

    def __init__(self, pair: Pair, other: int, peer: int, monitor: Monitor) -> None:
        """`other` is the neighbour's place in the `pair`, `peer` its rank."""
        self._pair = pair
        self._other = other
        self._peer = peer
        self._monitor = monitor
        self._out = Courier(f"to rank {peer}", self._named, monitor)
        self._in = Courier(f"from rank {peer}", self._named, monitor)
        self._num_given = self._num_sent = 0  # each counted by one thread alone

    def send(self, data: bytes, what: str) -> None:
        """Waits only where the neighbour has not taken some earlier messages yet. `what` travels along, so that two ranks that
        call different methods find out.

        Raises:
            PipelineError: the neighbour is gone, or did not take them.
        """
        self.wait_sent(what, _MOST_UNSENT - 1)
        label = what.encode()
        head = _HEAD.pack(len(data), len(label)) + label
        room = _FRAME_BYTES - len(head)
        self._send(head + data[:room].ljust(room, b"\0"), what)
        if len(data) > room:
            self._send(data[room:], what)

    def wait_sent(self, what: str, most_unsent: int = 0) -> None:
        """Wait until the neighbour has taken all that was sent, but for `most_unsent` messages.

        Raises:
            PipelineError: the neighbour is gone, or did not take them.
        """
        self._monitor.wait(
            lambda: self._num_given - self._num_sent <= most_unsent,
            lambda: f"{self._monitor.name} waits for {self._named()} to take {what}",
        )

    def receive(self, what: str) -> bytes:
        """What the neighbour sent as `what`.

        Raises:
            PipelineError: the neighbour sent something else, is gone, or did not come.
        """
        frame = self._receive(_FRAME_BYTES, what)
        size, length = _HEAD.unpack_from(frame)
        start = _HEAD.size + length
        theirs = frame[_HEAD.size : start].decode()
        if theirs != what:
            text = (
                f"{self._monitor.name} called {what} where {self._named()} called {theirs}: every rank must call the same "
                "methods in the same order"
            )
            self._monitor.fail(text)
            raise PipelineError(text)
        data = frame[start : start + size]
        return data if len(data) == size else data + self._receive(size - len(data), what)

    def _send(self, data: bytes, what: str) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._num_given += 1
        transfer: Transfer = functools.partial(self._pair.send, [tensor], self._other, _TAG)
        if len(data) <= _FRAME_BYTES:
            transfer = self._out.begun(transfer)

        def sent() -> None:
            self._num_sent += 1

        def job() -> Callable[[], None]:
            finish(transfer())
            return sent

        self._out.submit(what, job)

    def _receive(self, size: int, what: str) -> bytes:
        tensor = torch.empty(size, dtype=torch.uint8)
        arrived: list[bool] = []

        def job() -> Callable[[], None]:
            finish(self._pair.recv([tensor], self._other, _TAG))
            return lambda: arrived.append(True)

        self._in.submit(what, job)
        self._monitor.wait(lambda: bool(arrived), lambda: f"{self._monitor.name} waits for {what} from {self._named()}")
        return tensor.numpy().tobytes()

    def _named(self) -> str:
        return self._monitor.named(self._peer)

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def abort(self) -> None:
        break_off(self._pair, self._other)
