"""The two parts of a corpus: what is trained on, and what is held out. No file, nor a copy of one, is in both."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The bytes of both parts and the files they came from; a single file that was cut in two is in both lists."""

    train: bytes
    heldout: bytes
    train_files: tuple[pathlib.Path, ...]
    heldout_files: tuple[pathlib.Path, ...]


def fingerprint_of(split: Split) -> str:
    """The SHA-256 of all bytes, in the order in which they are read; where the two parts meet counts too."""
    digest = hashlib.sha256(len(split.train).to_bytes(8, "little"))
    digest.update(split.train)
    digest.update(split.heldout)
    return digest.hexdigest()


def split_files(files: Sequence[pathlib.Path], heldout_fraction: float) -> Split:
    """Read `files` and hold out `heldout_fraction` of their bytes (0: nothing), file by file.

    Files are taken in the order of the SHA-256 of their content: it depends on nothing but the content, scatters neighbours, and makes
    copies of a file one (a copy is read once). A file is held out where the wanted bytes are not passed by it; if every
    file would pass them, the smallest is. A single file is cut: its last bytes are held out.
    """
    distinct = _read_distinct(files)
    wanted = int(heldout_fraction * sum(len(content) for _, content in distinct))
    if wanted == 0:
        return _split(distinct, held=set())
    if len(distinct) == 1:
        path, content = distinct[0]
        return Split(content[:-wanted], content[-wanted:], (path,), (path,))
    held, taken = set(), 0
    for index, (_, content) in enumerate(distinct):
        if taken + len(content) <= wanted:
            held.add(index)
            taken += len(content)
    if not held:
        held = {min(range(len(distinct)), key=lambda index: len(distinct[index][1]))}
    return _split(distinct, held)


def _read_distinct(files: Sequence[pathlib.Path]) -> list[tuple[pathlib.Path, bytes]]:
    """Path and content of the files that are not empty, by the digest of the content; of copies the first."""
    contents: dict[bytes, tuple[pathlib.Path, bytes]] = {}
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): allow it, or leave it out of data.pattern"
            ) from None
        if content:
            contents.setdefault(hashlib.sha256(content).digest(), (path, content))
    return [contents[digest] for digest in sorted(contents)]


def _split(distinct: list[tuple[pathlib.Path, bytes]], held: set[int]) -> Split:
    heldout = [distinct[index] for index in sorted(held)]
    train = [pair for index, pair in enumerate(distinct) if index not in held]
    return Split(
        train=b"".join(content for _, content in train),
        heldout=b"".join(content for _, content in heldout),
        train_files=tuple(path for path, _ in train),
        heldout_files=tuple(path for path, _ in heldout),
    )
