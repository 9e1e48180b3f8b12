"""The few small messages that are no ops: the header of a call down the chain of ranks, its loss back up, norms, reports.

Rank r talks to r - 1 and r + 1 only, so that what a rank opens does not grow with the number of ranks.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import Store

from pipetrain.group.courier import Courier, finish
from pipetrain.group.failure import Monitor, PipelineError
from pipetrain.group.pair import Pair, break_off, make_pair

# Every message begins with a frame of this size, whatever it is: two ranks that call different methods then still understand
# each other well enough to say so, where gloo would abort on different sizes.
_FRAME_BYTES = 1024
_HEAD = struct.Struct("<QH")  # bytes of data, bytes of the label
_TIME = struct.Struct("<d")
_STAMPS = struct.Struct("<dddd")  # when a message passed a rank, up and down, and its clock: offset and error
_TAG = 0
_CLOCK_TRIPS = 8
# Of one neighbour: a rank that runs ahead of the others waits, and does not pile up messages.
_MOST_UNSENT = 4

HandOn = Callable[[bytes | None], bytes]


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
        self._num_given = self._num_sent = 0  # each counted by one thread alone

    def send(self, data: bytes, what: str) -> None:
        """Waits only where the neighbour has not taken some earlier messages yet. `what` travels along, so that two ranks that
        call different methods find out.

        Raises:
            PipelineError: the neighbour is gone, or did not take them.
        """
        self._monitor.wait(
            lambda: self._num_given - self._num_sent < _MOST_UNSENT,
            lambda: f"rank {self._rank} waits for rank {self._peer} to take {what}",
        )
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
        self._num_given += 1

        def sent() -> None:
            self._num_sent += 1

        def job() -> Callable[[], None]:
            finish(self._pair.send([tensor], self._other, _TAG))
            return sent

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

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def abort(self) -> None:
        break_off(self._pair, self._other)


class Chain:
    """The ranks of one replica in order. Every method is collective: all ranks call it, in the same order, as the same `what`.

    Two of them carry messages, `down` from rank 0 to the last and `up` from the last to rank 0; the others are made of these.

        down   rank 0 ---> rank 1 ---> rank 2       each rank hands on `hand_on(received)`;
        up     rank 0 <--- rank 1 <--- rank 2       where it begins, nothing was received (None)
    """

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

    def down(self, hand_on: HandOn, what: str) -> bytes:
        """From rank 0 to the last. Returns what this rank handed on.

        Raises:
            PipelineError: the rank before called something else, is gone, or did not come within the time-out.
        """
        return _pass_on(self._before, self._after, hand_on, what)

    def up(self, hand_on: HandOn, what: str) -> bytes:
        """From the last rank to rank 0. Returns what this rank handed on.

        Raises:
            PipelineError: the rank after called something else, is gone, or did not come within the time-out.
        """
        return _pass_on(self._after, self._before, hand_on, what)

    def broadcast(self, value: bytes, root: int, what: str) -> bytes:
        """The `value` of rank `root` on every rank: one way where it is an end of the chain, else up and down."""
        if root > 0:
            value = self.bring(value if self.rank == root else None, what)
        if root < self.num_ranks - 1:
            value = self.down(lambda received: value if received is None else received, what)
        return value

    def bring(self, value: bytes | None, what: str) -> bytes:
        """To rank 0 the value of the one rank that gives one, the others give None. Elsewhere it returns what was handed on."""
        return self.up(lambda received: (received or b"") if value is None else value, what)

    def largest(self, value: int, what: str) -> int:
        """The largest `value` of any rank, on every rank."""
        largest = self.down(lambda received: str(max(value, int(received or value))).encode(), what)
        return int(self.up(lambda received: largest if received is None else received, what))

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        """What each rank gives, in rank order, on every rank."""
        parts = self.down(lambda received: _pack([*_split(received), own]), what)
        return _split(self.up(lambda received: parts if received is None else received, what))

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, in rank order, on rank 0; None elsewhere."""
        parts = self.up(lambda received: _pack([own, *_split(received)]), what)
        return _split(parts) if self.rank == 0 else None

    def align_clocks(self) -> Clock:
        """How this rank's clock differs from rank 0's: from neighbour to neighbour, by the quickest of some round trips
        (Cristian 1989, *Probabilistic clock synchronization*, section 4; four times per trip as in Mills 1991, *Internet time
        synchronization*, section 3).

            rank r - 1   -- passed up -------- passed down --     of this rank's round trip the neighbour has
            rank r     passed up ----------------- passed down    had the message for the time in between
        """
        what, clock = "the clock", Clock(0.0, 0.0)
        trips: list[tuple[float, float]] = []  # how wrong the neighbour's offset may be, and the offset
        for _ in range(_CLOCK_TRIPS):
            (passed_up,) = _TIME.unpack(self.up(lambda _: _TIME.pack(time.perf_counter()), what))

            def stamp(received: bytes | None, passed_up: float = passed_up) -> bytes:
                nonlocal clock
                passed_down = time.perf_counter()
                if received is not None:
                    before_up, before_down, offset, error = _STAMPS.unpack(received)
                    away, there = passed_down - passed_up, before_down - before_up
                    trips.append(((away - there) / 2, (before_up + before_down - passed_up - passed_down) / 2))
                    clock = _next_clock(Clock(offset, error), *min(trips))
                return _STAMPS.pack(passed_up, passed_down, clock.offset_seconds, clock.error_seconds)

            self.down(stamp, what)
        return clock

    def close(self) -> None:
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.close()

    def abort(self) -> None:
        """A call has failed: break the connections, so that nobody waits on this rank."""
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.abort()


def _pass_on(source: _Neighbour | None, target: _Neighbour | None, hand_on: HandOn, what: str) -> bytes:
    value = hand_on(None if source is None else source.receive(what))
    if target is not None:
        target.send(value, what)
    return value


def _next_clock(before: Clock, error: float, offset: float) -> Clock:
    """Of a rank whose neighbour has the clock `before` and is ahead of it by `offset`, give or take `error`."""
    # Ranks of one machine share their clock: there the round trip is all that is seen, and it is no difference.
    difference = offset if abs(offset) > error else 0.0
    return Clock(before.offset_seconds + difference, before.error_seconds + error)


def _pack(parts: list[bytes]) -> bytes:
    sizes = json.dumps([len(part) for part in parts]).encode()
    return len(sizes).to_bytes(8, "little") + sizes + b"".join(parts)


def _split(data: bytes | None) -> list[bytes]:
    if data is None:
        return []
    end = 8 + int.from_bytes(data[:8], "little")
    parts = []
    for size in json.loads(data[8:end]):
        parts.append(data[end : end + size])
        end += size
    return parts
