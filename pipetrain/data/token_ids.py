"""Token ids that somebody else has written: a .bin file as nanoGPT has it, all ids of a corpus one after the other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipetrain.data.scan import remembered
from pipetrain.data.token_file import Ids

_BLOCK_ITEMS = 2**22


@dataclass(frozen=True)
class IdFile:
    """A mapped file of ids. `digest` is the SHA-256 of its bytes."""

    ids: Ids
    digest: str
    largest: int


def check_id_file(key: str, path: Path, item_type: str) -> int:
    """How many ids are in the file.

    Raises:
        ValueError: there is no such file, it is empty, or it does not hold a whole number of ids.
    """
    if not path.is_file():
        raise ValueError(
            f"{key}={path} is no file (seen from {Path.cwd()}): data=memmap reads a .bin file of token ids, or a folder that "
            "`pipetrain tokenize --out=FOLDER` made"
        )
    size, each = path.stat().st_size, np.dtype(item_type).itemsize
    if size % each:
        raise ValueError(
            f"{key}={path} has {size} bytes, no multiple of the {each} that a token id of data.item_type={item_type} has; set "
            "data.item_type to the type that it was written with, or write it again"
        )
    if not size:
        raise ValueError(f"{key}={path} is empty: give a file with token ids")
    return size // each


def read_id_file(key: str, path: Path, item_type: str, memory: Path) -> IdFile:
    """The file, read once as a whole to know what it holds; of a large one that is kept in the folder `memory`.

    Raises:
        ValueError: as `check_id_file`, or it cannot be read, or holds what is no id.
    """
    check_id_file(key, path, item_type)
    ids = np.asarray(np.memmap(path, item_type, "r"))
    digest, least, largest = remembered([path], memory, f"ids-{item_type}", lambda: _looked_at(ids))
    if least < 0:
        raise ValueError(f"{key}={path} holds {least}, which is no token id: is it of data.item_type={item_type}?")
    return IdFile(ids, digest, largest)


def fingerprint_of_ids(train: str, heldout: str | None, item_type: str, num_heldout: int) -> str:
    """Equal for the same ids, cut in the same place."""
    return hashlib.sha256(f"{train} {heldout} {item_type} {num_heldout}".encode()).hexdigest()


def _looked_at(ids: Ids) -> tuple[str, int, int]:
    """The digest of the bytes, the least and the largest id."""
    digest, least, largest = hashlib.sha256(), 0, 0
    for first in range(0, len(ids), _BLOCK_ITEMS):
        block = ids[first : first + _BLOCK_ITEMS]
        digest.update(block.tobytes())
        least, largest = min(least, int(block.min())), max(largest, int(block.max()))
    return digest.hexdigest(), least, largest
