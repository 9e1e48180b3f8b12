"""The few small messages that are no ops: the header of a call down the chain of ranks, its loss back up, norms, reports.

Rank r talks to r - 1 and r + 1 only, so that what a rank opens does not grow with the number of ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from pipetrain.runtime.courier import Courier, finish
from pipetrain.runtime.failure import Monitor
from pipetrain.runtime.gloo import Pair, break_off, make_pair

_HEADER_BYTES = 1024
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

    def send(self, tensor: Tensor, what: str) -> None:
        """Does not wait: the courier keeps the tensor until it has left."""

        def job() -> Callable[[], None]:
            finish(self._pair.send([tensor], self._other, _TAG))
            return lambda: None

        self._out.submit(what, job)

    def receive(self, tensor: Tensor, what: str) -> Tensor:
        arrived: list[bool] = []

        def job() -> Callable[[], None]:
            finish(self._pair.recv([tensor], self._other, _TAG))
            return lambda: arrived.append(True)

        self._in.submit(what, job)
        self._monitor.wait(lambda: bool(arrived), lambda: f"rank {self._rank} waits for {what} from rank {self._peer}")
        return tensor

    def send_bytes(self, data: bytes, what: str) -> None:
        self.send(torch.tensor([len(data)]), what)
        if data:
            self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), what)

    def receive_bytes(self, what: str) -> bytes:
        size = int(self.receive(torch.empty(1, dtype=torch.int64), what))
        return self.receive(torch.empty(size, dtype=torch.uint8), what).numpy().tobytes() if size else b""

    def compare_clocks(self) -> tuple[float, float]:
        """Seconds that the neighbour's clock is ahead of this rank's, and by how much that may be wrong."""
        trips = []
        for _ in range(_CLOCK_TRIPS):
            start = time.perf_counter()
            self.send(torch.zeros(1, dtype=torch.float64), "the clock")
            theirs = float(self.receive(torch.empty(1, dtype=torch.float64), "the clock"))
            end = time.perf_counter()
            trips.append(((end - start) / 2, theirs - (start + end) / 2))
        error, offset = min(trips)
        return offset, error

    def answer_clock(self) -> None:
        """The other side of `compare_clocks`."""
        for _ in range(_CLOCK_TRIPS):
            self.receive(torch.empty(1, dtype=torch.float64), "the clock")
            self.send(torch.tensor([time.perf_counter()], dtype=torch.float64), "the clock")

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
            received = self._before.receive(torch.empty(_HEADER_BYTES, dtype=torch.uint8), what)
            header = json.loads(received.numpy().tobytes().rstrip(b"\0"))
        assert header is not None
        amend(header)
        if self._after is not None:
            text = json.dumps(header).encode()
            assert len(text) <= _HEADER_BYTES, f"a header of {len(text)} bytes"
            self._after.send(torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8), what)
        return header

    def from_last(self, values: Tensor, what: str) -> Tensor:
        """The values of the last rank on every rank; `values` has the same shape everywhere."""
        if self._after is not None:
            values = self._after.receive(torch.empty_like(values), what)
        if self._before is not None:
            self._before.send(values, what)
        return values

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        """What each rank gives, in rank order, on every rank."""
        parts: list[bytes] = []
        if self._before is not None:
            parts = _split(self._before.receive_bytes(what))
        parts.append(own)
        if self._after is not None:
            self._after.send_bytes(_pack(parts), what)
            parts = _split(self._after.receive_bytes(what))
        if self._before is not None:
            self._before.send_bytes(_pack(parts), what)
        return parts

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, in rank order, on rank 0; None elsewhere."""
        parts = [own]
        if self._after is not None:
            parts += _split(self._after.receive_bytes(what))
        if self._before is None:
            return parts
        self._before.send_bytes(_pack(parts), what)
        return None

    def align_clocks(self) -> Clock:
        """How this rank's clock differs from rank 0's: from neighbour to neighbour, by the quickest of some round trips
        (Cristian 1989, *Probabilistic clock synchronization*, section 4)."""
        offset = error = 0.0
        if self._before is not None:
            best_offset, best_error = self._before.compare_clocks()
            before = self._before.receive(torch.empty(2, dtype=torch.float64), "the clock")
            # Ranks of one machine share their clock: there the round trip is all that is seen, and it is no difference.
            offset = float(before[0]) + (best_offset if abs(best_offset) > best_error else 0.0)
            error = float(before[1]) + best_error
        if self._after is not None:
            self._after.answer_clock()
            self._after.send(torch.tensor([offset, error], dtype=torch.float64), "the clock")
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
