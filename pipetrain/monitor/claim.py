"""One run at a time in a run folder: its first rank holds a lock there, which ends with the process, however that ends.

The lock is the kernel's, on the file `run.lock`, so what a killed run leaves blocks nobody. The file says who has the folder, and is
gone when the run has ended. Over NFS the server keeps the lock, for all machines.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pipetrain.config.read_files import parse_json
from pipetrain.config.terminal import say
from pipetrain.config.write_files import open_to_append

LOCK = "run.lock"
_MODE = 0o640
_MOST_HOLDER_BYTES = 4096
_PAUSE_SECONDS = 0.05
_GLANCE_SECONDS = 1.0  # whoever only looks has the lock for a moment, too
_DYING_SECONDS = 5.0  # what a killed process may take until it is gone, with its lock
_LOST_SECONDS = 120.0  # what a network file system may keep the lock of a machine that is gone (NFSv4: 90 s)
_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def claimed(run_dir: Path, *, again: bool) -> Iterator[None]:
    """While the block runs, no other run may claim `run_dir`, a folder that exists. On the first rank of the run alone.

    `again`: the run goes on with one that was killed, so that it waits until that is gone.

    Raises:
        ValueError: another run has it; the message says which.
    """
    with _taken(run_dir / LOCK, again=again) as file:
        file.truncate(0)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        file.write(json.dumps(who).encode())
        try:
            yield
        finally:
            (run_dir / LOCK).unlink(missing_ok=True)  # while it is ours: whoever has opened it sees that it is gone


def check_unclaimed(run_dir: str | None, *, again: bool) -> None:
    """Checks `run_dir` before a process starts.

    Raises:
        ValueError: as `claimed`.
    """
    if run_dir is not None and (path := Path(run_dir) / LOCK).is_file() and os.access(path, os.R_OK | os.W_OK):
        with _taken(path, again=again, only_look=True):
            pass


@contextlib.contextmanager
def _taken(path: Path, *, again: bool, only_look: bool = False) -> Iterator[IO[bytes]]:
    """The file, locked; with `only_look` others may look too."""
    started = time.monotonic()
    while True:
        is_new = not path.exists()
        with _opened(path) as file:
            try:
                fcntl.lockf(file, (fcntl.LOCK_SH if only_look else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _check_without_locks(path, again=again, is_new=is_new)
                    yield file
                    return
                if error.errno not in _TAKEN:
                    raise
                host, who = _holder(file)
            else:
                if only_look or _is_still(path, file):
                    yield file
                    return
                continue  # the run that had it has just ended
        patience = _GLANCE_SECONDS
        if again:  # the killed run may not be gone yet
            patience = _DYING_SECONDS if host == socket.gethostname() else _LOST_SECONDS
        if time.monotonic() - started > patience:
            raise ValueError(
                f"run_dir={path.parent}: another run is in this folder{who}; choose another run_dir, or wait for its "
                "end: resume=auto resumes from its newest snapshot then"
            )
        time.sleep(_PAUSE_SECONDS)


def _opened(path: Path) -> IO[bytes]:
    try:
        return open_to_append(path, _MODE)
    except OSError as error:
        raise ValueError(
            f"run_dir={path.parent}: {path.name} cannot be opened there ({error.strerror}), so nobody could tell that a run is in "
            "this folder; choose another run_dir, or allow it"
        ) from error


def _is_still(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file is the one at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _check_without_locks(path: Path, *, again: bool, is_new: bool) -> None:
    """A file system without locks: a new run needs a folder where no run has been, one that goes on is trusted."""
    if not (again or is_new):
        raise ValueError(
            f"run_dir={path.parent}: {path.name} says that another run is in this folder, and this file system knows no locks; if "
            f"that run has ended remove {path}, else choose another run_dir"
        )
    say(f"{path.parent}: this file system knows no locks: start no other run there")


def _holder(file: IO[bytes]) -> tuple[str | None, str]:
    """The host whose run has the folder, and how an error names that run; None and "" while the lock file is still empty."""
    try:
        file.seek(0)
        holder = parse_json(file.read(_MOST_HOLDER_BYTES))
        return holder["host"], f" (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, TypeError, KeyError):
        return None, ""
