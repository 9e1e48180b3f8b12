"""Folders of tokens, each made once: by whoever comes first, while the others wait for it.

The maker holds a lock of the kernel's, which ends with its process; it writes a draft and renames it when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from pipetrain.data.token_file import TOKENS_JSON

Tell = Callable[[float], None]
"""Is told how much of something is done, from 0 to 1."""

_PAUSE_SECONDS = 0.1


def cache_root(cache_dir: str | None) -> Path:
    """`data.cache_dir`, or a folder of this user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetrain" / "tokens"


def made_once(folder: Path, make: Callable[[Path], None], *, timeout_seconds: float) -> Path:
    """`folder`, which `make(draft folder)` has filled: now, earlier, or in another process meanwhile.

    Raises:
        ValueError: it cannot be written, its file system has no locks, or nothing has come from its maker for `timeout_seconds`.
    """
    if _is_whole(folder):
        return folder
    draft = folder.with_name(f"{folder.name}.draft")
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), mode=0o640, fallback_to_soft=False)
    size, since = -1, time.monotonic()

    def made_meanwhile() -> bool:
        nonlocal size, since
        with contextlib.suppress(FileNotFoundError):  # the draft was renamed meanwhile
            if (now := sum(file.stat().st_size for file in draft.glob("*/*"))) != size:
                size, since = now, time.monotonic()
        if time.monotonic() - since > timeout_seconds:
            maker = Path(lock.lock_file).read_text() or "another process"
            raise ValueError(
                f"{folder} is being made by {maker}, which has not come on for {timeout_seconds:.0f} s (timeout_seconds); "
                "end it, or choose another data.cache_dir"
            )
        return _is_whole(folder)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout):  # it is whole now
            lock.acquire(poll_interval=_PAUSE_SECONDS, cancel_check=made_meanwhile)
        if not _is_whole(folder):
            Path(lock.lock_file).write_text(f"process {os.getpid()} on {socket.gethostname()}")
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
            draft.mkdir()
            make(draft)
            draft.rename(folder)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={folder.parent}: tokens cannot be kept there ({error.strerror or error}); choose another data.cache_dir"
        ) from error
    finally:
        if lock.is_locked:
            shutil.rmtree(draft, ignore_errors=True)
        lock.release()
    return folder


def _is_whole(folder: Path) -> bool:
    return (folder / TOKENS_JSON).is_file()
