"""The few small messages that are no ops: the header of a call down the chain of ranks, its loss back up, norms, reports.

Rank r talks to r - 1 and r + 1 only, so that what a rank opens does not grow with the number of ranks.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from pipetrain.group.courier import Courier, finish
from pipetrain.group.failure import Monitor, PipelineError
from pipetrain.group.pair import Pair, break_off, make_pair

# Every message begins with a frame of this size, whatever it is: two ranks that call different methods then still understand
# each other well enough to say so, where gloo would abort on different sizes.
_FRAME_BYTES = 1024
_HEAD = struct.Struct("<QH")  # bytes of data, bytes of the label
_TIME = struct.Struct("<d")
_TAG = 0
_CLOCK_TRIPS = 8


@dataclass(frozen=True)
class Clock:
    """Add `offset_seconds` to a time of this rank to have it on rank 0's clock, wrong by `error_seconds` at most."""

    offset_seconds: float
    error_seconds: float


class _Neighbour:
    """One neighbouring rank: host messages in both directions, in order, each direction on a thread of its own."""

    def __init__(self, pair: Pair, rank: int, peer: int, monitor: Monitor) -> None:
        self._pair = pair
        self._other = int(peer > rank)
        self._rank = rank
        self._peer = peer
        self._monitor = monitor
        self._out = Courier(f"to rank {peer}", f"rank {peer}", monitor)
        self._in = Courier(f"from rank {peer}", f"rank {peer}", monitor)

    def send(self, data: bytes, what: str) -> None:
        """Does not wait. `what` travels along, so that two ranks that call different methods find out."""
        label = what.encode()
        head = _HEAD.pack(len(data), len(label)) + label
        room = _FRAME_BYTES - len(head)
        self._send(head + data[:room].ljust(room, b"\0"), what)
        if len(data) > room:
            self._send(data[room:], what)

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
                f"rank {self._rank} called {what} where rank {self._peer} called {theirs}: every rank must call the same "
                "methods in the same order"
            )
            self._monitor.fail(text)
            raise PipelineError(text)
        data = frame[start : start + size]
        return data if len(data) == size else data + self._receive(size - len(data), what)

    def _send(self, data: bytes, what: str) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def job() -> Callable[[], None]:
            finish(self._pair.send([tensor], self._other, _TAG))
            return lambda: None

        self._out.submit(what, job)

    def _receive(self, size: int, what: str) -> bytes:
        tensor = torch.empty(size, dtype=torch.uint8)
        arrived: list[bool] = []

        def job() -> Callable[[], None]:
            finish(self._pair.recv([tensor], self._other, _TAG))
            return lambda: arrived.append(True)

        self._in.submit(what, job)
        self._monitor.wait(lambda: bool(arrived), lambda: f"rank {self._rank} waits for {what} from rank {self._peer}")
        return tensor.numpy().tobytes()

    def compare_clocks(self) -> tuple[float, float]:
        """Seconds that the neighbour's clock is ahead of this rank's, and by how much that may be wrong."""
        trips = []
        for _ in range(_CLOCK_TRIPS):
            start = time.perf_counter()
            self.send(b"", "the clock")
            (theirs,) = _TIME.unpack(self.receive("the clock"))
            end = time.perf_counter()
            trips.append(((end - start) / 2, theirs - (start + end) / 2))
        error, offset = min(trips)
        return offset, error

    def answer_clock(self) -> None:
        """The other side of `compare_clocks`."""
        for _ in range(_CLOCK_TRIPS):
            self.receive("the clock")
            self.send(_TIME.pack(time.perf_counter()), "the clock")

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def abort(self) -> None:
        break_off(self._pair, self._other)


class Chain:
    """The ranks of one replica in order. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, store: Store | None, rank: int, num_ranks: int, monitor: Monitor) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._before = self._after = None
        if store is not None and rank > 0:
            self._before = self._meet(store, rank - 1, monitor)
        if store is not None and rank < num_ranks - 1:
            self._after = self._meet(store, rank + 1, monitor)

    def _meet(self, store: Store, peer: int, monitor: Monitor) -> _Neighbour:
        pair = make_pair(store, f"chain/{min(self.rank, peer)}", int(self.rank > peer), monitor.timeout_seconds)
        return _Neighbour(pair, self.rank, peer, monitor)

    def relay(
        self, header: dict[str, Any] | None, amend: Callable[[dict[str, Any]], None], what: str
    ) -> dict[str, Any]:
        """Rank 0 gives `header`; each rank receives it, may `amend` it, and hands it on. Returns it as amended here."""
        if self._before is not None:
            header = json.loads(self._before.receive(what))
        assert header is not None
        amend(header)
        if self._after is not None:
            self._after.send(json.dumps(header).encode(), what)
        return header

    def from_last(self, values: Tensor, what: str) -> Tensor:
        """The values of the last rank on every rank; `values` has the same shape and dtype everywhere."""
        if self._after is not None:
            values = torch.frombuffer(bytearray(self._after.receive(what)), dtype=values.dtype)
        if self._before is not None:
            self._before.send(values.numpy().tobytes(), what)
        return values

    def text_from_last(self, text: str, what: str) -> str:
        """The text of the last rank on every rank."""
        if self._after is not None:
            text = self._after.receive(what).decode()
        if self._before is not None:
            self._before.send(text.encode(), what)
        return text

    def largest(self, value: int, what: str) -> int:
        """The largest `value` of any rank, on every rank."""
        if self._before is not None:
            value = max(value, int(self._before.receive(what)))
        if self._after is not None:
            self._after.send(str(value).encode(), what)
            value = int(self._after.receive(what))
        if self._before is not None:
            self._before.send(str(value).encode(), what)
        return value

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        """What each rank gives, in rank order, on every rank."""
        parts: list[bytes] = []
        if self._before is not None:
            parts = _split(self._before.receive(what))
        parts.append(own)
        if self._after is not None:
            self._after.send(_pack(parts), what)
            parts = _split(self._after.receive(what))
        if self._before is not None:
            self._before.send(_pack(parts), what)
        return parts

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, in rank order, on rank 0; None elsewhere."""
        parts = [own]
        if self._after is not None:
            parts += _split(self._after.receive(what))
        if self._before is None:
            return parts
        self._before.send(_pack(parts), what)
        return None

    def align_clocks(self) -> Clock:
        """How this rank's clock differs from rank 0's: from neighbour to neighbour, by the quickest of some round trips
        (Cristian 1989, *Probabilistic clock synchronization*, section 4)."""
        offset = error = 0.0
        if self._before is not None:
            best_offset, best_error = self._before.compare_clocks()
            known = json.loads(self._before.receive("the clock"))
            # Ranks of one machine share their clock: there the round trip is all that is seen, and it is no difference.
            offset = known["offset"] + (best_offset if abs(best_offset) > best_error else 0.0)
            error = known["error"] + best_error
        if self._after is not None:
            self._after.answer_clock()
            self._after.send(json.dumps({"offset": offset, "error": error}).encode(), "the clock")
        return Clock(offset, error)

    def close(self) -> None:
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.close()

    def abort(self) -> None:
        """A call has failed: break the connections, so that nobody waits on this rank."""
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.abort()


def _pack(parts: list[bytes]) -> bytes:
    sizes = json.dumps([len(part) for part in parts]).encode()
    return len(sizes).to_bytes(8, "little") + sizes + b"".join(parts)


def _split(data: bytes) -> list[bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    parts = []
    for size in json.loads(data[8:end]):
        parts.append(data[end : end + size])
        end += size
    return parts
