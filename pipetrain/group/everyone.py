"""What all ranks of a grid say to each other: along the replicas, and along the ranks of each replica.

         chain ->
replica 0   (0,0) --- (0,1) --- (0,2)       each rank has its neighbours in its replica, and those that stand where it does in
              |         |         |  |      the replicas before and after; with one replica nothing but the first
replica 1   (1,0) --- (1,1) --- (1,2)  replicas
"""

from __future__ import annotations

from pipetrain.group.chain import Chain, HandOn, bundle, unbundle


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
        return self.replicas.largest(self.chain.largest(value, what), what)

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        """What each rank gives, on every rank."""
        rows = self.replicas.concatenate(bundle(self.chain.concatenate(own, what)), what)
        return [part for row in rows for part in unbundle(row)]

    def gather(self, own: bytes, what: str) -> list[bytes] | None:
        """What each rank gives, on rank 0; None elsewhere."""
        row = self.chain.gather(own, what)
        if row is None:
            return None
        rows = self.replicas.gather(bundle(row), what)
        return None if rows is None else [part for row in rows for part in unbundle(row)]

    def wait_sent(self, what: str) -> None:
        """Wait until the neighbours have taken what this rank sent: then it may end, and they still know."""
        self.chain.wait_sent(what)
        self.replicas.wait_sent(what)

    def close(self) -> None:
        self.chain.close()
        self.replicas.close()

    def abort(self) -> None:
        """A call has failed: break the connections, so that nobody waits on this rank."""
        self.chain.abort()
        self.replicas.abort()
