"""Damage on purpose to what lies on a disk: positions in a file at which to flip or cut it, and a disk that is full."""

from __future__ import annotations

import os
from pathlib import Path

_FILLER = "filler"
_CHUNK_BYTES = 1 << 16


def places(path: Path) -> dict[str, int]:
    """A position for each kind of byte: the first, one in the middle, the last; in a safetensors file also one in its header and
    the first of its data."""
    size = path.stat().st_size
    found = {"first": 0, "middle": size // 2, "last": size - 1}
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            end = 8 + int.from_bytes(file.read(8), "little")
        found |= {"header": end // 2, "first of data": end}
    return found


def fill_disk(folder: Path, *, leave_bytes: int = 0) -> Path:
    """Fill the disk that `folder` is on until `leave_bytes` are free; returns the file that does, to be removed again.

    For a small disk that holds nothing else, such as a tmpfs.

    Raises:
        ValueError: the disk has more than 256 MiB free: that is no disk for this.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free > 256 << 20:
        raise ValueError(f"{folder}: its disk has {free} bytes free; only a small one of its own may be filled")
    filler = folder / _FILLER
    with filler.open("wb") as file:
        try:
            for _ in range(max(free - leave_bytes, 0) // _CHUNK_BYTES):
                file.write(bytes(_CHUNK_BYTES))
                file.flush()
        except OSError:  # full a little earlier, by what others write
            pass
    return filler
