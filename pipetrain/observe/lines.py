"""Files of JSON lines, one or more a step, that a run appends to for weeks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path


class LineFile:
    """Appends lines at once, each whole or not at all. A disk that is full costs lines and not the run; it is said once.

    Lines of steps before `first_step` stay: a run that goes on from a snapshot repeats the others.
    """

    def __init__(self, path: Path, first_step: int = 1) -> None:
        _keep_before(path, first_step)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._failed = False

    def write(self, lines: Iterable[str]) -> None:
        """Appends `lines`, which end with a line break each."""
        data = "".join(lines).encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError("No space left on device")
            self._size += len(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # no half of a line
            if not self._failed:
                self._failed = True
                reason = error.strerror or error
                print(f"pipetrain: {self._path} lacks lines from here on ({reason})", file=sys.stderr, flush=True)

    def rewind(self, first_step: int) -> None:
        """Drops the lines of `first_step` and later ones: they will be written again."""
        self.close()
        with contextlib.suppress(OSError):  # a full disk: the lines come twice
            _keep_before(self._path, first_step)
        self._file = self._path.open("ab", buffering=0)
        self._size = self._path.stat().st_size

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _keep_before(path: Path, first_step: int) -> None:
    kept = []
    if first_step > 1 and path.is_file():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # half a line: a process was killed while it wrote
                if json.loads(line)["step"] < first_step:
                    kept.append(line + "\n")
    draft = path.with_suffix(".draft")
    draft.write_text("".join(kept))
    draft.replace(path)
