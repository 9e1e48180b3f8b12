"""The two parts of a text: what is trained on, and what is held out. No file, nor a copy of one, is in both."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipetrain.data.corpus import opened
from pipetrain.data.scan import Scanned

_LONGEST_LINE = 2**20


class Piece(NamedTuple):
    """Bytes `first` to `last - 1` of what a file holds."""

    path: Path
    first: int
    last: int


@dataclass(frozen=True)
class Split:
    """The pieces of both parts, in the order in which they are read; a single file that was cut in two is in both."""

    train: tuple[Piece, ...]
    heldout: tuple[Piece, ...]


def split_files(files: Sequence[Scanned], heldout_fraction: float) -> Split:
    """Holds out `heldout_fraction` of the bytes of `files` (0: nothing), file by file.

    Files are taken in the order of the SHA-256 of their content: it depends on nothing but the content, scatters neighbours, and makes
    copies of a file one (a copy is read once). A file is held out where the wanted bytes are not passed by it; if every
    file would pass them, the smallest is. A single file is cut: its last bytes are held out.
    """
    pieces = in_order(files)
    wanted = int(heldout_fraction * sum(piece.last for piece in pieces))
    if wanted == 0:
        return Split(pieces, ())
    if len(pieces) == 1:
        path, _, size = pieces[0]
        return Split((Piece(path, 0, size - wanted),), (Piece(path, size - wanted, size),))
    held, taken = set(), 0
    for piece in pieces:
        if taken + piece.last <= wanted:
            held.add(piece)
            taken += piece.last
    if not held:
        held = {min(pieces, key=lambda piece: piece.last)}
    return Split(
        tuple(piece for piece in pieces if piece not in held), tuple(piece for piece in pieces if piece in held)
    )


def in_order(files: Sequence[Scanned]) -> tuple[Piece, ...]:
    """The files that are not empty, whole, by the digest of their content; of copies the first."""
    distinct: dict[bytes, Piece] = {}
    for file in files:
        if file.size:
            distinct.setdefault(file.digest, Piece(file.path, 0, file.size))
    return tuple(distinct[digest] for digest in sorted(distinct))


def cut_at_a_line(split: Split) -> Split:
    """Where a single file was cut in two, the first part ends with a line (or a character, in a very long one): for tokenizers of text."""
    if not (split.train and split.heldout and split.train[-1].path == split.heldout[0].path):
        return split
    path, first, last = split.train[-1]
    with opened(path) as file:
        file.seek(max(first, last - _LONGEST_LINE))
        before = file.read(last - max(first, last - _LONGEST_LINE))
    end = before.rfind(b"\n") + 1
    cut = last - (len(before) - end) if end else last - _in_character(before)
    if cut == first:
        return split
    return Split((Piece(path, first, cut),), (Piece(path, cut, split.heldout[0].last),))


def read_pieces(pieces: Sequence[Piece]) -> bytes:
    """All their bytes.

    Raises:
        ValueError: a file cannot be read, or is not what it was.
    """
    return b"".join(map(_read, pieces))


def fingerprint_of(train: bytes, heldout: bytes) -> str:
    """The SHA-256 of all bytes, in the order in which they are read; where the two parts meet counts too."""
    digest = hashlib.sha256(len(train).to_bytes(8, "little"))
    digest.update(train)
    digest.update(heldout)
    return digest.hexdigest()


def changed(path: Path) -> ValueError:
    """The error for a file that is no longer what it was a moment ago."""
    return ValueError(f"{path} has changed while it was read; start again when it is whole")


def _in_character(text: bytes) -> int:
    """How many bytes at the end of `text` are of a character of UTF-8 that is not whole."""
    for count in range(1, min(4, len(text)) + 1):
        byte = text[-count]
        if byte & 0xC0 != 0x80:  # the first byte of a character, which says how many it has
            whole = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return count if count < whole else 0
    return 0


def _read(piece: Piece) -> bytes:
    with opened(piece.path) as file:
        file.seek(piece.first)
        content = file.read(piece.last - piece.first)
    if len(content) != piece.last - piece.first:
        raise changed(piece.path)
    return content
