"""Who else is on the machine: what they find open there, and what they send to it."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta

from commands import children_of, links_of, listening
from torch.distributed import TCPStore

_ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class Forged:
    """Runs a command where somebody unpickles it."""

    command: str

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def run_of(pid: int) -> list[int]:
    """The launcher and all below it."""
    return [pid, *(below for child in children_of(pid) for below in run_of(child))]


def ports_of(pids: list[int]) -> set[int]:
    """Where these processes listen, on any address."""
    return {port for pid in pids for _, port in listening(pid)}


def num_descriptors(pid: int) -> int:
    """How many it has; 0: it has ended."""
    try:
        return len(links_of(pid))
    except OSError:
        return 0


def forge(port: int, command: str) -> int:
    """Puts a pickle that runs `command` under every key of the store at the port; returns under how many: none where there is no store."""
    text = base64.b64encode(pickle.dumps(Forged(command))).decode()
    try:
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_ANSWER_SECONDS), wait_for_workers=False)
        keys: list[str] = store.list_keys()
        for key in keys:
            store.set(key.removeprefix("/"), text)
    except RuntimeError:
        return 0
    return len(keys)


def disturb(port: int, at: int) -> bool:
    """One connection, as port scanners and broken clients make them: closed at once, left half open, with garbage, or reset. Whether
    it was accepted."""
    with socket.socket() as stranger:
        stranger.settimeout(_ANSWER_SECONDS)
        try:
            stranger.connect(("127.0.0.1", port))
            if at % 4 == 1:
                stranger.shutdown(socket.SHUT_WR)
            if at % 4 == 2:
                stranger.sendall(os.urandom(64))
            if at % 4 == 3:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            return False
    return True
