"""The files of a corpus: found, known by digests (of large ones kept for as long as they stay as they are), and split into what is trained on and held out."""

from __future__ import annotations

import collections
import contextlib
import difflib
import glob
import gzip
import hashlib
import io
import json
import os
import stat
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipetrain.config.read_files import parse_json
from pipetrain.config.records import DataConfig
from pipetrain.config.write_files import replace_file, user_cache

GZIP = ".gz"
# Folders of the standard library that are not it: what was installed later, and its tests (huge, repetitive, often left out).
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def find_files(config: DataConfig) -> list[Path]:
    """The files of `data.path` or of the standard library, in one order on every machine. Raises ValueError: none, or one may not be read."""
    if config.name == "stdlib":
        if config.path is not None:
            raise ValueError(f"data.path={config.path} is for your own text: type data=text data.path={config.path}")
        root = Path(sysconfig.get_path("stdlib"))
        # Folders that are left out are not entered: site-packages alone may hold twenty times as many files.
        below = [one.name for one in root.iterdir() if one.is_dir() and not one.is_symlink()]
        patterns = ["*.py", *(f"{name}/**/*.py" for name in below if name not in _NOT_STDLIB)]
        files = [file for file in _sorted_files(root, *patterns) if not _NOT_STDLIB & set(file.relative_to(root).parts)]
        if not files:
            raise ValueError(f"data=stdlib: no Python sources in {root}; use your own text: data=text data.path=FOLDER")
        return _readable(files, "data=stdlib")
    assert config.path is not None, "it was checked"
    return files_at("data.path", config.path, config.pattern)


def files_at(key: str, given: str, pattern: str) -> list[Path]:
    """The file `given`, those of a folder that match `pattern` (also with .gz), or those of a glob. Raises ValueError: none, or one may not be read."""
    path = Path(given).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _files_in(path, f"{key}={given}", given, pattern)
    elif path.exists():
        raise ValueError(f"{key}={given} is neither a file nor a folder: give one that is")
    else:
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not files and glob.has_magic(given):
            raise ValueError(f"{key}={given} matches no file (seen from {Path.cwd()}); give a glob that does")
        if not files:
            names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            near = [path.with_name(name) for name in difflib.get_close_matches(path.name, names, n=1)]
            hint = f"did you mean {key}={near[0]}?" if near else "give a file or folder that exists"
            raise ValueError(f"{key}={given} is not there (seen from {Path.cwd()}); {hint}")
    return _readable(files, f"{key}={given}")


def _readable(files: list[Path], key: str) -> list[Path]:
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{key}: {file} may not be read; allow it with: chmod +r {file}")
    return files


def _files_in(folder: Path, key: str, given: str, pattern: str) -> list[Path]:
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"{key} may not be read; allow it with: chmod +rx {given}")
    try:
        files = _sorted_files(folder, pattern, pattern + GZIP)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"data.pattern={pattern!r} is no pattern inside a folder ({error}); allowed are globs such as '**/*.txt' or '*.md'"
        ) from None
    if not files:
        kinds = collections.Counter(file.suffix for file in folder.rglob("*") if file.is_file())
        hint = "there is no file in it: give another data.path"
        if kinds:
            hint = f"for the commonest kind in it, type data.pattern='**/*{kinds.most_common(1)[0][0]}'"
        raise ValueError(f"data.pattern={pattern!r} matches no file in {key}; {hint}")
    return files


def cache_root(cache_dir: str | None) -> Path:
    """`data.cache_dir`, or a folder of this user's cache. Raises ValueError: everybody may write there, so its tokens may be anybody's."""
    if cache_dir is None:
        return user_cache("tokens")
    root = Path(cache_dir).expanduser()
    if root.is_dir() and root.stat().st_mode & stat.S_IWOTH:
        raise ValueError(
            f"data.cache_dir={cache_dir}: everybody may write into this folder, so its tokens may be anybody's; choose another, or "
            f"type: chmod o-w {root}"
        )
    return root


def memory_of(config: DataConfig) -> Path:
    """Where digests of large files are kept."""
    return cache_root(config.cache_dir) / "files"


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, unpacked where its name ends with .gz. Raises ValueError: it cannot be read, or is damaged."""
    try:
        with path.open("rb") as file:
            yield gzip.GzipFile(fileobj=file) if path.suffix == GZIP else file
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(path, reason) from None


def _unreadable(path: object, reason: str | None) -> ValueError:
    return ValueError(f"{path} cannot be read ({reason}): allow it, or leave it out of data.pattern")


def key_of_text(config: DataConfig) -> str:
    """What the user typed to choose the text, for messages."""
    return f"data={config.name}" if config.path is None else f"data.path={config.path}"


def _sorted_files(root: Path, *patterns: str) -> list[Path]:
    found = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


_SMALL_BYTES = 2**26  # files that together are smaller are read each time: a tenth of a second
_SETTLED_SECONDS = 2.0  # a file changed so lately may change again within the tick of its file system's clock


class Scanned(NamedTuple):
    """A file, the SHA-256 of what it holds (unpacked), and how many bytes that is."""

    path: Path
    digest: bytes
    size: int


def scan(files: Sequence[Path], memory: Path) -> list[Scanned]:
    """The digest and size of each file; of many bytes they are kept in the folder `memory`. Raises ValueError: a file cannot be read."""
    found = remembered(files, memory, "digests", lambda: [_scanned(file) for file in files])
    return [Scanned(file, bytes.fromhex(digest), size) for file, (digest, size) in zip(files, found, strict=True)]


def remembered(files: Sequence[Path], memory: Path, what: str, find: Callable[[], Any]) -> Any:
    """What `find` says of the files, as JSON has it. Of many bytes it is kept in the folder `memory`, under their names, sizes and times."""
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        raise _unreadable(error.filename, error.strerror) from None
    is_settled = time.time() - max((stat.st_mtime for stat in stats), default=0.0) > _SETTLED_SECONDS
    if sum(stat.st_size for stat in stats) < _SMALL_BYTES or not is_settled:
        return find()
    looks = [(str(file.resolve()), s.st_size, s.st_mtime_ns, s.st_ino) for file, s in zip(files, stats, strict=True)]
    kept = memory / f"{what}-{hashlib.sha256(json.dumps(looks).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        return parse_json(kept.read_bytes())
    found = find()
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, json.dumps(found))
    return found


def digest_of(found: Sequence[Scanned]) -> str:
    """One SHA-256 of several files, in their order."""
    return hashlib.sha256(b"".join(one.digest for one in found)).hexdigest()


def _scanned(path: Path) -> tuple[str, int]:
    with opened(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return digest.hexdigest(), file.tell()


_LONGEST_LINE = 2**20


class Piece(NamedTuple):
    """Bytes `first` to `last - 1` of what a file holds."""

    path: Path
    first: int
    last: int


@dataclass(frozen=True)
class Split:
    """The pieces of what is trained on and what is held out, in the order in which they are read: no file, nor a copy of one, is in both.

    But for a single file, which is cut in two.
    """

    train: tuple[Piece, ...]
    heldout: tuple[Piece, ...]


def split_files(train: Sequence[Scanned], heldout: Sequence[Scanned], eval_fraction: float) -> Split:
    """Holds out the files `heldout`; without any, `eval_fraction` of the bytes of `train` (0: nothing), file by file.

    Files are taken in the order of the SHA-256 of their content: it depends on nothing but the content, scatters neighbours, and makes
    copies of a file one (a copy is read once). A file is held out where the wanted bytes are not passed by it; if every
    file would pass them, the smallest is. A single file is cut: its last bytes are held out.
    """
    pieces = _in_order(train)
    wanted = int(eval_fraction * sum(piece.last for piece in pieces))
    if heldout or wanted == 0:
        return Split(pieces, _in_order(heldout))
    if len(pieces) == 1:
        path, _, size = pieces[0]
        return Split((Piece(path, 0, size - wanted),), (Piece(path, size - wanted, size),))
    held, taken = set(), 0
    for piece in pieces:
        if taken + piece.last <= wanted:
            held.add(piece)
            taken += piece.last
    held = held or {min(pieces, key=lambda piece: piece.last)}
    train_pieces = tuple(piece for piece in pieces if piece not in held)
    return Split(train_pieces, tuple(piece for piece in pieces if piece in held))


def _in_order(files: Sequence[Scanned]) -> tuple[Piece, ...]:
    """The files that are not empty, whole, by the digest of their content; of copies the first."""
    distinct: dict[bytes, Piece] = {}
    for file in files:
        if file.size:
            distinct.setdefault(file.digest, Piece(file.path, 0, file.size))
    return tuple(distinct[digest] for digest in sorted(distinct))


def files_of(config: DataConfig) -> tuple[list[Scanned], list[Scanned]]:
    """The files that are read, and those that are held out as a whole; of these no copy is trained on."""
    train = scan(find_files(config), memory_of(config))
    if config.eval_path is None:
        return train, []
    heldout = scan(files_at("data.eval_path", config.eval_path, config.pattern), memory_of(config))
    held = {file.digest for file in heldout}
    return [file for file in train if file.digest not in held], heldout


def cut_at_a_line(split: Split) -> Split:
    """Where a single file was cut in two, the first part ends with a line (or a character, in a very long one): for tokenizers of text."""
    if not (split.train and split.heldout and split.train[-1].path == split.heldout[0].path):
        return split
    path, first, last = split.train[-1]
    before = b"".join(blocks_of(Piece(path, max(first, last - _LONGEST_LINE), last)))
    cut = last - len(before) + (before.rfind(b"\n") + 1 or end_of_characters(before))
    if cut == first:
        return split
    return Split((Piece(path, first, cut),), (Piece(path, cut, split.heldout[0].last),))


PIECE_BYTES = 2**18  # that are read at once


def blocks_of(piece: Piece) -> Iterator[bytes]:
    """All its bytes. Raises ValueError: the file cannot be read, or is not what it was."""
    left = piece.last - piece.first
    with opened(piece.path) as file:
        file.seek(piece.first)
        while left:
            block = file.read(min(PIECE_BYTES, left))
            if not block:
                raise ValueError(f"{piece.path} has changed while it was read; start again when it is whole")
            left -= len(block)
            yield block


def read_pieces(pieces: Sequence[Piece]) -> bytes:
    """All their bytes, likewise."""
    return b"".join(block for piece in pieces for block in blocks_of(piece))


def end_of_characters(text: bytes) -> int:
    """Where the last character of UTF-8 begins, which may not be whole."""
    end = len(text) - 1
    while end > len(text) - 4 and text[end] & 0xC0 == 0x80:
        end -= 1
    return end
