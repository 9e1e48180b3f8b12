"""Folders of tokens, each made once: by whoever comes first, while the others wait for it.

The maker holds a lock of the kernel's, which ends with its process, and says in the lock's file how far it is. It writes a draft and renames
it when it is whole. Where the file system knows no locks two may make the same, and the first that is whole stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pipetrain.data.token_file import TOKENS_JSON

Tell = Callable[[float], None]
"""Is told how much of something is done, from 0 to 1."""

_PAUSE_SECONDS = 0.1
_TOLD_SECONDS = 0.5  # between two words of how far it is
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def cache_root(cache_dir: str | None) -> Path:
    """`data.cache_dir`, or a folder of this user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetrain" / "tokens"


def made_once(folder: Path, make: Callable[[Path, Tell], None], *, timeout_seconds: float, tell: Tell | None) -> Path:
    """`folder`, which `make(draft folder, tell)` has filled: now, earlier, or in another process meanwhile.

    Raises:
        ValueError: it cannot be written, or whoever makes it has not come on for `timeout_seconds`.
    """
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _turn(folder, timeout_seconds) as lock:
            if not _is_whole(folder):
                _make(folder, make, _Told(lock, tell))
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={folder.parent}: tokens cannot be kept there ({error.strerror or error}); choose another data.cache_dir"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    return (folder / TOKENS_JSON).is_file()


def _make(folder: Path, make: Callable[[Path, Tell], None], tell: Tell) -> None:
    for left in folder.parent.glob(f"{folder.name}.draft-{socket.gethostname()}-*"):
        if not _runs(int(left.name.rpartition("-")[2])):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
    draft = folder.with_name(f"{folder.name}.draft-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        make(draft, tell)
        try:
            draft.rename(folder)
        except OSError:
            if not _is_whole(folder):  # without locks another may have been first, with the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class _Told:
    """Writes how far it is into the lock's file, for those who wait, and passes it on."""

    def __init__(self, lock: Path, tell: Tell | None) -> None:
        self._lock = lock
        self._tell = tell
        self._at = float("-inf")

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self._at >= _TOLD_SECONDS:
            self._at = now
            word = {"pid": os.getpid(), "host": socket.gethostname(), "done": round(share, 6), "at": now}
            self._lock.write_text(json.dumps(word))
        if self._tell is not None:
            self._tell(share)


@contextlib.contextmanager
def _turn(folder: Path, timeout_seconds: float) -> Iterator[Path]:
    """The lock, by its file; while another has it, as long as that one comes on."""
    path = folder.with_name(f"{folder.name}.lock")
    word, since = "", time.monotonic()

    def made_meanwhile() -> bool:
        nonlocal word, since
        if (said := path.read_text()) != word:
            word, since = said, time.monotonic()
        if time.monotonic() - since > timeout_seconds:
            raise ValueError(
                f"{folder} is being made by {_maker(word)}, which has not come on for {timeout_seconds:.0f} s "
                "(timeout_seconds); end it, or choose another data.cache_dir"
            )
        return _is_whole(folder)

    lock = FileLock(path, mode=0o640, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=_PAUSE_SECONDS, cancel_check=made_meanwhile)
    except Timeout:
        assert _is_whole(folder), "nothing else ends the wait"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield path
    finally:
        lock.release()


def _maker(word: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        maker = json.loads(word)
        return f"process {maker['pid']} on {maker['host']} ({maker['done']:.0%} done)"
    return "another process"
