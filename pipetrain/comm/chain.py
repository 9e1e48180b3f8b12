"""The few small messages that are no ops: the header of a call down the chain of ranks, its loss back up, norms, reports.

Rank r talks to r - 1 and r + 1 only, so that what a rank opens does not grow with the number of ranks; and rank 0 does not wait for
the last, which a collective would make it do.

         chain ->
replica 0   (0,0) --- (0,1) --- (0,2)       `Chain`: the ranks of one replica, or those at one place of each
              |         |         |  |      `Everyone`: both, for all ranks
replica 1   (1,0) --- (1,1) --- (1,2)  replicas
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence

import torch
from torch.distributed import Store

from pipetrain.comm.courier import Courier, Pair, Transfer, break_off, finish, make_pair
from pipetrain.comm.failure import Monitor, PipelineError

HandOn = Callable[[bytes | None], bytes]

# Every message begins with a frame of this size, whatever it is: two ranks that call different methods then still understand
# each other well enough to say so, where gloo would abort on different sizes.
_FRAME_BYTES = 1024
_HEAD = struct.Struct("<QH")  # bytes of data, bytes of the label
_TAG = 0
# With so many messages unsent, a rank waits for its neighbour.
_MOST_UNSENT = 4


class Chain:
    """Ranks in order: those of one replica, or those that stand at one place of each. Every method is collective: all of them call it, in the
    same order, as the same `what`. They count from 0 on the chain, and `ranks` says who they are in messages; None: the same.

    Two methods carry messages, `down` from rank 0 to the last and `up` from the last to rank 0; the others use these.

        down   rank 0 ---> rank 1 ---> rank 2       each rank hands on `hand_on(received)`;
        up     rank 0 <--- rank 1 <--- rank 2       where it begins, nothing was received (None)
    """

    def __init__(
        self, store: Store | None, rank: int, num_ranks: int, monitor: Monitor, ranks: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._ranks = range(num_ranks) if ranks is None else ranks
        self._before = self._after = None
        if store is not None and rank > 0:
            self._before = self._meet(store, rank - 1, monitor)
        if store is not None and rank < num_ranks - 1:
            self._after = self._meet(store, rank + 1, monitor)

    def _meet(self, store: Store, peer: int, monitor: Monitor) -> Neighbour:
        pair = make_pair(
            store, f"chain/{min(self.rank, peer)}", int(self.rank > peer), monitor.named(self._ranks[peer]), monitor
        )
        return Neighbour(pair, int(peer > self.rank), self._ranks[peer], monitor)

    @property
    def _neighbours(self) -> list[Neighbour]:
        return [neighbour for neighbour in (self._before, self._after) if neighbour is not None]

    def down(self, hand_on: HandOn, what: str) -> bytes:
        """From rank 0 to the last. Returns what this rank handed on.

        Raises PipelineError: the rank before called something else, is gone, or did not come within the time-out.
        """
        return _pass_on(self._before, self._after, hand_on, what)

    def up(self, hand_on: HandOn, what: str) -> bytes:
        """From the last rank to rank 0. Returns what this rank handed on.

        Raises PipelineError: the rank after called something else, is gone, or did not come within the time-out.
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
        """Brings rank 0 the value of the one rank that gives one, not None. Elsewhere it returns what was handed on."""
        return self.up(lambda received: (received or b"") if value is None else value, what)

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        """What each rank gives, in rank order, on every rank."""
        if self.num_ranks == 1:
            return [own]
        parts = self.down(lambda received: _bundle([*_unbundle(received), own]), what)
        return _unbundle(self.up(lambda received: parts if received is None else received, what))

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, in rank order, on rank 0; None elsewhere."""
        parts = self.up(lambda received: _bundle([own, *_unbundle(received)]), what)
        return _unbundle(parts) if self.rank == 0 else None

    def wait_sent(self, what: str) -> None:
        """Wait until the neighbours have taken what this rank sent: then it may end, and nothing is lost.

        Raises PipelineError: one of them is gone, or did not take it.
        """
        for neighbour in self._neighbours:
            neighbour.wait_sent(what)

    def close(self) -> None:
        for neighbour in self._neighbours:
            neighbour.close()

    def abort(self) -> None:
        """A call has failed: break the connections, so that nobody waits on this rank."""
        for neighbour in self._neighbours:
            neighbour.abort()


class Everyone:
    """All ranks. Every method is collective: all ranks call it, in the same order, as the same `what`. Results are in the order of
    the replicas, and in each in that of its ranks; rank 0 is the first rank of the first replica."""

    def __init__(self, chain: Chain, replicas: Chain) -> None:
        """`chain` has the ranks of this rank's replica, `replicas` those that stand where it does in each replica."""
        self.chain = chain
        self.replicas = replicas

    def down(self, hand_on: HandOn, what: str) -> bytes:
        """From rank 0 to the first rank of each replica, and from each of these to its last. Returns what this rank handed on."""
        if self.chain.rank > 0:
            return self.chain.down(hand_on, what)
        value = self.replicas.down(hand_on, what)
        return self.chain.down(lambda _: value, what)

    def broadcast(self, value: bytes, what: str) -> bytes:
        """The `value` of rank 0, on every rank."""
        return self.down(lambda received: value if received is None else received, what)

    def largest(self, value: int, what: str) -> int:
        """The largest `value` of any rank, on every rank."""
        return max(map(int, self.concatenate(str(value).encode(), what)))

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        """What each rank gives, on every rank."""
        rows = self.replicas.concatenate(_bundle(self.chain.concatenate(own, what)), what)
        return [part for row in rows for part in _unbundle(row)]

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, on rank 0; None elsewhere."""
        row = self.chain.gather(own, what)
        if row is None:
            return None
        rows = self.replicas.gather(_bundle(row), what)
        return None if rows is None else [part for row in rows for part in _unbundle(row)]

    def close(self) -> None:
        self.chain.close()
        self.replicas.close()

    def abort(self) -> None:
        """A call has failed: break the connections, so that nobody waits on this rank."""
        self.chain.abort()
        self.replicas.abort()


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

        Raises PipelineError: the neighbour is gone, or did not take them.
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

        Raises PipelineError: the neighbour is gone, or did not take them.
        """
        self._monitor.wait(
            lambda: self._num_given - self._num_sent <= most_unsent,
            lambda: f"{self._monitor.name} waits for {self._named()} to take {what}",
        )

    def receive(self, what: str) -> bytes:
        """What the neighbour sent as `what`. Raises PipelineError: the neighbour sent something else, is gone, or did not come."""
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


def _pass_on(source: Neighbour | None, target: Neighbour | None, hand_on: HandOn, what: str) -> bytes:
    value = hand_on(None if source is None else source.receive(what))
    if target is not None:
        target.send(value, what)
    return value


def _bundle(parts: list[bytes]) -> bytes:
    """Several messages as one: how many, how long each is, and all in a row."""
    return struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _unbundle(data: bytes | None) -> list[bytes]:
    """The bundled parts; of None, none."""
    if data is None:
        return []
    (count,) = struct.unpack_from("<Q", data)
    ends = itertools.accumulate(struct.unpack_from(f"<{count}Q", data, 8), initial=8 + 8 * count)
    return [data[start:end] for start, end in itertools.pairwise(ends)]
