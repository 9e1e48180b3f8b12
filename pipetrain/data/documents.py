"""Documents: what a corpus is read as, one by one, each with the place where it stands.

A corpus of files is never in memory. A long text is read in pieces that end with a line, of which only the first begins the document and
only the last ends it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipetrain.config.problem import nearest
from pipetrain.config.read_files import parse_json
from pipetrain.config.records import DataConfig
from pipetrain.config.terminal import printable
from pipetrain.data.corpus import Piece, Scanned, Split, blocks_of, digest_of, end_of_characters, opened, scan

MESSAGES = "messages"  # the field of a chat
CONVERSATIONS = "conversations"  # that of a chat of ShareGPT, whose messages have `from` and `value`
# By `from`; others are called so.
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_LONGEST_LINE = 2**24

Row = Mapping[str, Any]


Place = tuple[int, int]
"""Where a document stands: in which of the corpus' sources, and on which line (or row); 0 is the whole source."""


class Document(NamedTuple):
    """A text, or a chat (a row with `messages`); or, with a `problem`, what is neither. `size` bytes of the corpus are read with it.

    A text is bytes where it is a file, or a piece of one, which must be UTF-8 for all tokenizers but `byte`.
    """

    content: bytes | str | Row
    place: Place
    size: int
    is_heldout: bool
    begins: bool = True
    ends: bool = True
    problem: str | None = None


@dataclass(frozen=True)
class Corpus:
    """What may be tokenized. `sources` are the names that places speak of; `digest` changes with what `documents` gives."""

    sources: Sequence[str]
    digest: str
    num_bytes: int  # of a data set its rows: nobody knows how many bytes they have
    documents: Callable[[], Iterator[Document]]


def text_corpus(split: Split, digest: str) -> Corpus:
    """Files of text, each a document, in the order of their `split`."""
    pieces = split.train + split.heldout

    def documents() -> Iterator[Document]:
        for number, piece in enumerate(pieces):
            yield from _documents_of(piece, (number, 0), number >= len(split.train))

    num_bytes = sum(piece.last - piece.first for piece in pieces)
    return Corpus([str(piece.path) for piece in pieces], digest, num_bytes, documents)


def json_corpus(train: Sequence[Scanned], heldout: Sequence[Scanned], fraction: float, text_field: str) -> Corpus:
    """Files with a JSON object on each line (empty lines are skipped); `heldout` files are held out as a whole, else a `fraction`
    of the documents in `train`."""
    files = [*train, *heldout]

    def rows() -> Iterator[_Row]:
        for number, file in enumerate(files):
            with opened(file.path) as lines:
                for line_number, line in enumerate(lines, 1):
                    if stripped := line.strip():
                        yield (number, line_number), number >= len(train), stripped

    num_bytes = sum(file.size for file in files)
    names = [str(file.path) for file in files]
    return Corpus(
        names, digest_of(files), num_bytes, lambda: _documents_of_rows(rows, 0.0 if heldout else fraction, text_field)
    )


_Row = tuple[Place, bool, bytes | Row]  # where it stands; whether all of its source is held out; the row, or its JSON


def _documents_of_rows(rows: Callable[[], Iterator[_Row]], fraction: float, text_field: str) -> Iterator[Document]:
    is_heldout = choose_heldout(lambda: (row for *_, row in rows()), fraction)
    seen: set[str] = set()
    for place, held, row in rows():
        size = len(row) if isinstance(row, bytes) else 1
        content: str | Row = ""
        problem = None
        try:
            content = _content_of(parse_json(row) if isinstance(row, bytes) else row, text_field, seen)
        except json.JSONDecodeError as error:
            problem = f"it is not valid JSON ({error.msg}, column {error.colno})"
        except UnicodeDecodeError as error:
            problem = f"it is not UTF-8 (byte {error.start} of the line)"
        except ValueError as error:
            problem = str(error)
        yield Document(content, place, size, held or is_heldout(row), problem=problem)


def _content_of(row: Any, text_field: str, seen: set[str]) -> str | Row:
    """The text of a row, or the row where it is a chat. `seen`: the field of rows before. Raises ValueError: it is neither, or another kind."""
    if not isinstance(row, Mapping):
        raise ValueError(f"it is not a JSON object but a {type(row).__name__}")
    given = _as_messages(row)
    field = MESSAGES if given.get(MESSAGES) is not None else text_field
    content = given.get(field)
    if content is None:
        fields = printable(", ".join(map(str, given)), lines=False) or "none"
        raise ValueError(
            f"it has neither `{MESSAGES}` (or `{CONVERSATIONS}`) nor `{text_field}` (data.text_field), its fields are: {fields}"
        )
    if other := seen - {field}:
        raise ValueError(f"it has `{field}`, those before have `{other.pop()}`: a corpus is of texts or of chats")
    seen.add(field)
    if field == MESSAGES:
        if not isinstance(content, Sequence) or isinstance(content, str) or not content:
            raise ValueError(f"`{MESSAGES}` is no list of messages, or an empty one")
        for number, message in enumerate(content):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"message {number} of `{MESSAGES}` is no object with a `role`")
        return given
    if not isinstance(content, str):
        raise ValueError(f"`{field}` is no text but a {type(content).__name__}")
    return content


def _as_messages(row: Row) -> Row:
    """A row of ShareGPT as one with `messages`; any other as it is. Raises ValueError: a message has no `from` and `value`."""
    turns = row.get(CONVERSATIONS)
    if row.get(MESSAGES) is not None or not isinstance(turns, Sequence) or isinstance(turns, str):
        return row
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for number, turn in enumerate(turns):
        if (
            not isinstance(turn, Mapping)
            or not isinstance(turn.get("from"), str)
            or not isinstance(turn.get("value"), str)
        ):
            raise ValueError(f"message {number} of `{CONVERSATIONS}` is no object with the texts `from` and `value`")
        messages.append({"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]})
    return {**row, MESSAGES: messages}


def choose_heldout(rows: Callable[[], Iterable[bytes | Row]], fraction: float) -> Callable[[bytes | Row], bool]:
    """Which documents are held out: `fraction` of all that differ (at least one, where it is not 0 and two differ).

    They are those with the smallest hashes, so it depends on what the documents hold alone, and copies are on one side.
    """
    if fraction == 0.0:
        return lambda _: False
    hashes = np.unique(np.fromiter(map(_hash, rows()), np.uint64))
    if len(hashes) < 2:
        return lambda _: False
    bound = hashes[max(1, int(fraction * len(hashes)))]
    return lambda row: _hash(row) < bound


def _hash(row: bytes | Row) -> int:
    content = row if isinstance(row, bytes) else json.dumps(row, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _documents_of(piece: Piece, place: Place, is_heldout: bool) -> Iterator[Document]:
    """One file, in pieces where it is long."""
    left, rest, begins = piece.last - piece.first, b"", True
    for block in blocks_of(piece):
        left -= len(block)
        text, rest = _cut_after_a_line(rest + block) if left else (rest + block, b"")
        if text:
            yield Document(text, place, len(text), is_heldout, begins, ends=not left)
            begins = False


def _cut_after_a_line(block: bytes) -> tuple[bytes, bytes]:
    """What is certain to end with a line, and the rest: a new line follows only where the next byte is no space of any kind.

    Tokenizers take white space together, so that tokens would differ if it were torn apart. A line that is too long is cut where a
    character ends.
    """
    end = len(block) - 1
    while (end := block.rfind(b"\n", 0, end)) >= 0:
        if not block[end + 1 : end + 2].isspace():
            return block[: end + 1], block[end + 1 :]
    if len(block) < _LONGEST_LINE:
        return b"", block
    end = end_of_characters(block)
    return block[:end], block[end:]


def check_installed(key: str, library: str) -> None:
    """Raises ValueError: a library that `key` needs is not installed."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(f'{key}: {library} is not installed; pip install "pipetrain[hf]" brings it')


def hf_corpus(config: DataConfig, memory: Path) -> Corpus:
    """The data set of `config`, downloaded if need be; digests are kept in the folder `memory`. Raises ValueError: there is none, or no such split."""
    assert config.path is not None, "it was checked"
    wanted = [("data.path", config.path, "data.split", config.split)]
    if has_heldout := config.eval_path is not None or config.eval_split is not None:
        key = "data.path" if config.eval_path is None else "data.eval_path"
        wanted.append((key, config.eval_path or config.path, "data.eval_split", config.eval_split or config.split))
    parts = [_load(key, path, config.subset, split_key, split) for key, path, split_key, split in wanted]
    digests = []  # of its files, where it has some, for its rows follow from them; what was made in memory has the library's
    for part in parts:
        files = [Path(file["filename"]) for file in part.cache_files]
        digests.append(digest_of(scan(files, memory)) if files else str(part._fingerprint))

    def rows() -> Iterator[_Row]:
        for number, part in enumerate(parts):
            for line, row in enumerate(part, 1):
                yield (number, line), number > 0, row

    return Corpus(
        [f"{path}[{split}]" for _, path, _, split in wanted],
        json.dumps(digests),
        sum(map(len, parts)),
        lambda: _documents_of_rows(rows, 0.0 if has_heldout else config.eval_fraction, config.text_field),
    )


def _load(key: str, path: str, subset: str | None, split_key: str, split: str) -> Any:
    from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()
    folder = Path(path).expanduser()
    is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        found = load_from_disk(str(folder)) if is_saved else load_dataset(path, subset)
    except Exception as error:  # whatever its readers, the hub or the network raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{key}={path}: this is no saved data set here, and no name that can be loaded ({reason})"
        ) from error
    if isinstance(found, Dataset):
        return found
    assert isinstance(found, DatasetDict), "datasets are not streamed"
    if split not in found:
        raise ValueError(f"{split_key}={split}: {path} has the splits {', '.join(found)}{nearest(split, list(found))}")
    return found[split]
