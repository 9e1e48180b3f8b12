"""Who else is on the machine: what they find open there, and what they send to it.

`python strangers.py` is another user, who tries each line of stdin: a folder, a command, and ports.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from commands import children_of, links_of, listening
from torch.distributed import TCPStore

NOBODY = 65534  # a user and a group of every Linux
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


@contextlib.contextmanager
def another_user() -> Iterator[Callable[[pathlib.Path, str, set[int]], tuple[int, bool]]]:
    """Tries as `NOBODY` to forge (see `forge`) at ports, and to look into a folder; returns how many keys and whether it could. Needs root."""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, __file__], **pipes, text=True, env=where) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None

        def attack(folder: pathlib.Path, command: str, ports: set[int]) -> tuple[int, bool]:
            print(json.dumps([str(folder), command, sorted(ports)]), file=stranger.stdin, flush=True)
            num_keys, could_look = json.loads(stranger.stdout.readline())
            return num_keys, could_look

        yield attack
        stranger.stdin.close()


def _be_another_user() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for line in sys.stdin:
        folder, command, ports = json.loads(line)
        try:
            could_look = bool(os.listdir(folder))
        except (PermissionError, FileNotFoundError):  # closed to others, or gone with the run
            could_look = False
        print(json.dumps([sum(forge(port, command) for port in ports), could_look]), flush=True)


if __name__ == "__main__":
    _be_another_user()
