"""The few small messages that are no ops: the header of a call down the chain of ranks, its loss back up, norms, reports.

Rank r talks to r - 1 and r + 1 only, so that what a rank opens does not grow with the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from torch.distributed import Store

from pipetrain.group.failure import Monitor
from pipetrain.group.neighbour import Neighbour
from pipetrain.group.pair import make_pair

HandOn = Callable[[bytes | None], bytes]


class Chain:
    """Ranks in order: those of one replica, or those that stand at one place of each. Every method is collective: all of them call it, in the
    same order, as the same `what`. They count from 0 on the chain, and `ranks` says who they are in messages; None: the same.

    Two of them carry messages, `down` from rank 0 to the last and `up` from the last to rank 0; the others are made of these.

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
        pair = make_pair(store, f"chain/{min(self.rank, peer)}", int(self.rank > peer), monitor.timeout_seconds)
        return Neighbour(pair, int(peer > self.rank), self._ranks[peer], monitor)

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
        if self.num_ranks == 1:
            return [own]
        parts = self.down(lambda received: bundle([*unbundle(received), own]), what)
        return unbundle(self.up(lambda received: parts if received is None else received, what))

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, in rank order, on rank 0; None elsewhere."""
        parts = self.up(lambda received: bundle([own, *unbundle(received)]), what)
        return unbundle(parts) if self.rank == 0 else None

    def wait_sent(self, what: str) -> None:
        """Wait until the neighbours have taken what this rank sent: then it may end, and they still know.

        Raises:
            PipelineError: one of them is gone, or did not take it.
        """
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.wait_sent(what)

    def close(self) -> None:
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.close()

    def abort(self) -> None:
        """A call has failed: break the connections, so that nobody waits on this rank."""
        for neighbour in (self._before, self._after):
            if neighbour is not None:
                neighbour.abort()


def _pass_on(source: Neighbour | None, target: Neighbour | None, hand_on: HandOn, what: str) -> bytes:
    value = hand_on(None if source is None else source.receive(what))
    if target is not None:
        target.send(value, what)
    return value


def bundle(parts: list[bytes]) -> bytes:
    """Several messages as one."""
    sizes = json.dumps([len(part) for part in parts]).encode()
    return len(sizes).to_bytes(8, "little") + sizes + b"".join(parts)


def unbundle(data: bytes | None) -> list[bytes]:
    """The other way round; of None, none."""
    if data is None:
        return []
    end = 8 + int.from_bytes(data[:8], "little")
    parts = []
    for size in json.loads(data[8:end]):
        parts.append(data[end : end + size])
        end += size
    return parts
