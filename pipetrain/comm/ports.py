"""Ports at which gloo waits for the members of a group: each is closed once they have come.

gloo keeps its listeners as long as the group lives, and never closes a connection of a stranger: a port scanner would take one
descriptor after the other, up to the limit of the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_SILENT_SECONDS = 1  # a stranger that connects and says nothing never becomes a descriptor; a rank speaks at once
_opening = threading.Lock()


@contextlib.contextmanager
def opened_ports() -> Iterator[set[int]]:
    """The descriptors of the ports that are opened in the block, which waits for nobody; filled in at its end.

    Empty where the system does not list descriptors as Linux does.
    """
    found: set[int] = set()
    with _opening:
        before = _listening()
        yield found
        found |= _listening() - before
        for descriptor in found:
            with socket.socket(fileno=os.dup(descriptor)) as port:
                port.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)


@contextlib.contextmanager
def closing_ports() -> Iterator[None]:
    """Closes the ports that are opened in the block, which may wait for other ranks: no other thread may open one meanwhile."""
    before = _listening()
    try:
        yield
    finally:
        close_ports(_listening() - before)


def close_ports(descriptors: set[int]) -> None:
    """Strangers are refused from now on; whoever is connected stays.

    gloo closes the descriptors itself later: until then their numbers must not be those of something else.
    """
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for descriptor in descriptors:
            os.dup2(nothing, descriptor, inheritable=False)
    finally:
        os.close(nothing)


def _listening() -> set[int]:
    found = set[int]()
    for entry in _DESCRIPTORS.iterdir() if sys.platform.startswith("linux") else ():
        with contextlib.suppress(OSError):  # another thread has closed it
            if entry.is_socket():
                with socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(int(entry.name))
    return found
