"""Links of a chosen speed on one machine: a host per rank, and the store of the ranks on the bridge between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..ranks import Place
from ..trial import Network
from .hosts import DEVICE, separate_hosts


@contextmanager
def shaped_network(num_ranks: int, *, megabits: int) -> Iterator[Network]:
    """A network of `num_ranks` namespaces while it is entered; nothing of it is left afterwards.

    Raises:
        Unavailable: the kernel refuses namespaces, bridges or the token bucket.
    """
    with separate_hosts(num_ranks) as network:
        for host in network.hosts:
            host.slow(megabits)
        yield Network(tuple(Place(host.name, DEVICE) for host in network.hosts), network.own_address)
