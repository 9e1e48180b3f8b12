"""Tokens on disk, as memory maps: a corpus may be larger than memory.

FOLDER/
  tokens.json              what it is: tokenizer, numbers, digests; written last
  train/tokens.bin         all token ids, one after the other (uint8, uint16 or uint32)
  train/ends.bin           int64 per document: where its tokens end
  train/places.bin         int64 [documents, 2]: in which source it stands, and on which line
  train/counted.bin        uint8 per token, of chats: whether it counts in the loss
  heldout/                 the same

And token ids that somebody else has written: a .bin file as nanoGPT has it, all ids of a corpus one after the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.config.read_files import DamagedFile, check_regular, read_object, read_record
from pipetrain.data.corpus import remembered
from pipetrain.data.documents import Document

TOKENS_JSON = "tokens.json"
PARTS = TRAIN, HELDOUT = "train", "heldout"
_AGAIN = "make it again: pipetrain tokenize"
FORMAT = 1  # of such a folder: another number makes all caches anew
_TYPES = ("uint8", "uint16", "uint32")

Ids = NDArray[Any]


@dataclass(frozen=True)
class PartNumbers:
    """What a part of a folder holds. `digest` is a SHA-256 of all its files but the places."""

    tokens: int
    documents: int
    counted: int  # tokens that count in the loss; of text all
    largest: int  # token id; -1 without tokens
    digest: str


@dataclass(frozen=True)
class TokenSheet:
    """tokens.json: what was tokenized, and by what."""

    format: int
    item_type: str
    vocabulary_size: int
    pad_token: int
    tokenizer: str  # what it was called
    tokenizer_digest: str
    is_chat: bool
    sources: list[str]
    parts: dict[str, PartNumbers]
    num_skipped: int  # documents that were no samples
    first_problem: str | None  # of these

    @property
    def fingerprint(self) -> str:
        """What makes the tokens these: equal for the same corpus and tokenizer, wherever they lie."""
        parts = [self.parts[part].digest for part in PARTS]
        return hashlib.sha256(json.dumps([*parts, self.tokenizer_digest]).encode()).hexdigest()


@dataclass(frozen=True)
class TokenPart:
    """The documents of one part, mapped: document i has the tokens `ends[i - 1]` to `ends[i] - 1`."""

    tokens: Ids
    ends: NDArray[np.int64]
    counted: NDArray[np.uint8] | None
    places: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)


def read_sheet(folder: Path) -> TokenSheet:
    """Raises DamagedFile: it cannot be read, or is of another version."""
    path = folder / TOKENS_JSON
    if (found := read_object(path, _AGAIN).get("format")) != FORMAT:
        raise DamagedFile(path, f"it is of format {found}, this version reads {FORMAT}", _AGAIN)
    sheet = read_record(TokenSheet, path, _AGAIN)
    if sheet.item_type not in _TYPES:
        raise DamagedFile(path, f"item_type is {sheet.item_type!r}", _AGAIN)
    if missing := set(PARTS) - sheet.parts.keys():
        raise DamagedFile(path, f"the part {missing.pop()!r} is missing", _AGAIN)
    return sheet


def read_part(folder: Path, sheet: TokenSheet, part: str) -> TokenPart:
    """Its files, mapped and read-only. Raises DamagedFile: one is missing, or has another size than it had."""
    numbers, folder = sheet.parts[part], folder / part
    return TokenPart(
        tokens=_mapped(folder / "tokens.bin", sheet.item_type, numbers.tokens),
        ends=_mapped(folder / "ends.bin", "int64", numbers.documents),
        counted=_mapped(folder / "counted.bin", "uint8", numbers.tokens) if sheet.is_chat else None,
        places=_mapped(folder / "places.bin", "int64", 2 * numbers.documents).reshape(-1, 2),
    )


def _mapped(path: Path, kind: str, count: int) -> Ids:
    if (size := check_regular(path, _AGAIN)) != (expected := count * np.dtype(kind).itemsize):
        raise DamagedFile(path, f"it has {size} bytes, not {expected}", _AGAIN)
    return np.asarray(np.memmap(path, kind, "r")) if size else np.empty(0, kind)


def check_tokens(folder: Path) -> None:
    """Reads all tokens of a folder. Raises DamagedFile: one cannot be read; ValueError: they are not what was written."""
    sheet = read_sheet(folder)
    for name in PARTS:
        read_part(folder, sheet, name)
        digests = {}
        for file in (folder / name).glob("*.bin"):
            with file.open("rb") as opened:
                digests[file.stem] = hashlib.file_digest(opened, "sha256").hexdigest()
        if _digest_of_part(digests) != sheet.parts[name].digest:
            raise ValueError(f"{folder / name}: its tokens have changed since they were written; {_AGAIN}")


def _digest_of_part(digests: Mapping[str, str]) -> str:
    """Of the digests of its files; where a document stood makes it no other."""
    known = [digests[name] for name in ("tokens", "ends", "counted") if name in digests]
    return hashlib.sha256("".join(known).encode()).hexdigest()


class PartWriter:
    """Appends documents to the files of one part, which `stack` closes, and hashes what they hold."""

    def __init__(self, folder: Path, kind: np.dtype[Any], stack: ExitStack, *, is_chat: bool) -> None:
        self._kind = kind
        folder.mkdir()
        names = ("tokens", "ends", "places", *(("counted",) if is_chat else ()))
        self._files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
        self._hashes = {name: hashlib.sha256() for name in names}
        self._tokens = self._documents = self._counted = 0
        self._largest = -1

    def add(self, ids: Ids, counted: NDArray[np.bool_] | None, lengths: Ids, documents: Sequence[Document]) -> None:
        """Several documents, or pieces of one: their `ids`, one after the other, and the `lengths` that they have."""
        ends = np.array([document.ends for document in documents])
        self._append("tokens", ids.astype(self._kind))
        self._append("ends", (np.cumsum(lengths, dtype=np.int64) + self._tokens)[ends])
        self._append("places", np.array([document.place for document in documents if document.ends], np.int64))
        if "counted" in self._files:
            assert counted is not None, "a chat says what counts"
            self._append("counted", counted.astype(np.uint8))
        self._tokens += len(ids)
        self._documents += int(ends.sum())
        self._counted += len(ids) if counted is None else int(counted.sum())
        if len(ids):
            self._largest = max(self._largest, int(ids.max()))

    def _append(self, name: str, values: NDArray[Any]) -> None:
        raw = values.tobytes()
        self._hashes[name].update(raw)
        self._files[name].write(raw)

    @property
    def numbers(self) -> PartNumbers:
        digests = {name: one.hexdigest() for name, one in self._hashes.items()}
        return PartNumbers(self._tokens, self._documents, self._counted, self._largest, _digest_of_part(digests))


_BLOCK_ITEMS = 2**22


class IdFile(NamedTuple):
    """A mapped file of ids. `digest` is the SHA-256 of its bytes."""

    ids: Ids
    digest: str
    largest: int


def check_id_file(key: str, path: Path, item_type: str) -> None:
    """Raises ValueError: there is no such file, it is empty, or it does not hold a whole number of ids."""
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


def read_id_file(key: str, path: Path, item_type: str, memory: Path) -> IdFile:
    """The file, read once to know what it holds; that is kept in the folder `memory`. Raises ValueError: it holds what is no id."""
    ids = np.asarray(np.memmap(path, item_type, "r"))
    digest, least, largest = remembered([path], memory, f"ids-{item_type}", lambda: _looked_at(ids))
    if least < 0:
        raise ValueError(f"{key}={path} holds {least}, which is no token id: is it of data.item_type={item_type}?")
    return IdFile(ids, digest, largest)


def _looked_at(ids: Ids) -> tuple[str, int, int]:
    """The digest of the bytes, the least and the largest id."""
    digest, least, largest = hashlib.sha256(), 0, 0
    for first in range(0, len(ids), _BLOCK_ITEMS):
        block = ids[first : first + _BLOCK_ITEMS]
        digest.update(block.tobytes())
        least, largest = min(least, int(block.min())), max(largest, int(block.max()))
    return digest.hexdigest(), least, largest
