"""Files of ours in folders where others may have put something: never written through a link, and under their names only once they are whole.

    folder of our own beside it ──► draft ──► rename ──► the file: as it was, or whole

Nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def draft_beside(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` when the block ends: in a new folder beside it, so that a library may open it by its
    name. A link at `path` is replaced, and what it leads to stays as it is. Raises OSError: it cannot be written."""
    folder = path.with_name(f".{path.name}.draft")
    with contextlib.suppress(OSError):
        folder.unlink()  # a link, or a file
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    folder.mkdir(mode=0o700)
    try:
        yield folder / path.name
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file, likewise."""
    with draft_beside(path) as draft:
        draft.write_text(text)


def open_to_append(path: Path, mode: int = 0o666) -> IO[bytes]:
    """A file that is read, and written at its end alone; made where it is not there. Raises OSError: it is a link, or no regular file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, mode), "a+b", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def user_cache(name: str) -> Path:
    """The folder `name` of this user's cache, `pipetrain` in $XDG_CACHE_HOME or ~/.cache, which nobody else may enter.

    Raises ValueError: somebody else may write there.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetrain"
    with contextlib.suppress(OSError):  # a cache that cannot be made costs time; whoever cannot do without says so
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := root.stat().st_uid) not in (os.geteuid(), 0):
            raise ValueError(f"{root} belongs to user {owner}; set XDG_CACHE_HOME to a folder of yours")
        root.chmod(0o700)
    return root / name
