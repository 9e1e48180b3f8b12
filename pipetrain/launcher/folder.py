"""The launcher's folder among the temporary files: ranks meet there, and leave in it how they ended. Nobody else can open it.

It goes with the run. A launcher that is killed leaves it, and the next one of the same user sweeps it as soon as no rank is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "pipetrain-run-"


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder of mode 0700, which is removed at the end."""
    _sweep()
    folder, held = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def hold(folder: Path) -> int:
    """The descriptor that keeps the folder from being swept: as long as it is open, so for the life of a process that leaves it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # swept before it was held
            held = hold(folder)
            if folder.exists():
                return folder, held
            os.close(held)


def _sweep() -> None:
    """Removes what nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, a link, somebody else sweeps it, or a run is in it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
