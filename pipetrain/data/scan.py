"""What files hold, as digests: read once, and of large ones kept for as long as they stay as they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipetrain.data.corpus import opened, unreadable

_BLOCK = 2**20
_SMALL_BYTES = 2**26  # files that together are smaller are read each time: a tenth of a second
_SETTLED_SECONDS = 2.0  # a file changed so lately may change again within the tick of its file system's clock


class Scanned(NamedTuple):
    """A file, the SHA-256 of what it holds (unpacked), and how many bytes that is."""

    path: Path
    digest: bytes
    size: int


def scan(files: Sequence[Path], memory: Path) -> list[Scanned]:
    """The digest and size of each file; of many bytes they are kept in the folder `memory`.

    Raises:
        ValueError: a file cannot be read.
    """
    found = remembered(files, memory, "digests", lambda: [_scanned(file) for file in files])
    return [Scanned(file, bytes.fromhex(digest), size) for file, (digest, size) in zip(files, found, strict=True)]


def remembered(files: Sequence[Path], memory: Path, what: str, find: Callable[[], Any]) -> Any:
    """What `find` says of the files, as JSON has it. Of many bytes it is kept in the folder `memory`, under their names, sizes and times."""
    stats = [stat_of(file) for file in files]
    is_settled = time.time() - max((stat.st_mtime for stat in stats), default=0.0) > _SETTLED_SECONDS
    if sum(stat.st_size for stat in stats) < _SMALL_BYTES or not is_settled:
        return find()
    looks = [(str(file.resolve()), s.st_size, s.st_mtime_ns, s.st_ino) for file, s in zip(files, stats, strict=True)]
    kept = memory / f"{what}-{hashlib.sha256(json.dumps(looks).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(kept.read_text())
    found = find()
    with contextlib.suppress(OSError):
        _write(kept, found)
    return found


def stat_of(file: Path) -> os.stat_result:
    """Raises:
    ValueError: the file is gone, or may not be looked at.
    """
    try:
        return file.stat()
    except OSError as error:
        raise unreadable(file, error.strerror) from None


def digest_of(found: Sequence[Scanned]) -> str:
    """One SHA-256 of several files, in their order."""
    return hashlib.sha256(b"".join(one.digest for one in found)).hexdigest()


def _scanned(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with opened(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.replace(path)
