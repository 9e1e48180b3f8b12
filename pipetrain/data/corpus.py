"""Which files a corpus is made of: found, not yet read."""

from __future__ import annotations

import collections
import difflib
import glob
import gzip
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from pipetrain.config.records import DataConfig

GZIP = ".gz"
# Folders of the standard library that are not it: what was installed later, and its tests (huge, repetitive, often left out).
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def find_files(config: DataConfig) -> list[pathlib.Path]:
    """The files of `data.path` (of the standard library, where `data=stdlib`), in an order that is the same on every machine; at least one.

    Raises ValueError where there is none, or one that may not be read.
    """
    if config.name == "stdlib":
        return _readable(_stdlib_files(config), "data=stdlib")
    if not config.path:
        raise ValueError(
            f"data.path is not set: data={config.name} reads a file or a folder of text; type data.path=FILE_OR_FOLDER"
        )
    return files_at("data.path", config.path, config.pattern)


def files_at(key: str, path: str, pattern: str) -> list[pathlib.Path]:
    """The files that `key=path` names: itself, those of a folder that match `pattern` (or do so but for .gz), or those of a glob.

    Raises:
        ValueError: there is none, or one that may not be read.
    """
    return _readable(_files_at(key, path, pattern), f"{key}={path}")


@contextmanager
def opened(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where its name ends with .gz.

    Raises:
        ValueError: it cannot be read, or is damaged.
    """
    try:
        with path.open("rb") as file:
            yield gzip.GzipFile(fileobj=file) if path.suffix == GZIP else file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise unreadable(path, reason) from None


def unreadable(path: pathlib.Path, reason: str | None) -> ValueError:
    """The error for a file that cannot be read."""
    return ValueError(f"{path} cannot be read ({reason}): allow it, or leave it out of data.pattern")


def key_of_text(config: DataConfig) -> str:
    """What the user typed to choose the text, for messages."""
    return f"data={config.name}" if config.path is None else f"data.path={config.path}"


def _stdlib_files(config: DataConfig) -> list[pathlib.Path]:
    """The running Python's own library: real text on every machine, without a download."""
    if config.path is not None:
        raise ValueError(f"data.path={config.path} is for your own text: type data=text data.path={config.path}")
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [file for file in _sorted_files(root, "**/*.py") if not _NOT_STDLIB & set(file.relative_to(root).parts)]
    if not files:
        raise ValueError(f"data=stdlib: no Python sources in {root}; use your own text: data=text data.path=FOLDER")
    return files


def _files_at(key: str, given: str, pattern: str) -> list[pathlib.Path]:
    path = pathlib.Path(given).expanduser()
    if not path.exists():
        return _of_glob(key, given, path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{key}={given} is neither a file nor a folder: give one that is")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ValueError(f"{key}={given} may not be read; allow it with: chmod +rx {given}")
    files = _matching_files(path, pattern)
    if not files:
        raise ValueError(f"data.pattern={pattern!r} matches no file in {key}={given}; {_what_is_in(path)}")
    return files


def _of_glob(key: str, given: str, path: pathlib.Path) -> list[pathlib.Path]:
    found = sorted(pathlib.Path(name) for name in glob.glob(str(path), recursive=True))
    files = [file for file in found if file.is_file()]
    if files:
        return files
    if glob.has_magic(given):
        raise ValueError(f"{key}={given} matches no file (seen from {pathlib.Path.cwd()}); give a glob that does")
    raise ValueError(f"{key}={given} is not there (seen from {pathlib.Path.cwd()}){_neighbour(key, path)}")


def _readable(files: list[pathlib.Path], key: str) -> list[pathlib.Path]:
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{key}: {file} may not be read; allow it with: chmod +r {file}")
    return files


def _matching_files(root: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    try:
        return _sorted_files(root, pattern, pattern + GZIP)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"data.pattern={pattern!r} is no pattern inside a folder ({error}); allowed are globs such as '**/*.txt' or '*.md'"
        ) from None


def _sorted_files(root: pathlib.Path, *patterns: str) -> list[pathlib.Path]:
    found = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _what_is_in(folder: pathlib.Path) -> str:
    kinds = collections.Counter(file.suffix for file in folder.rglob("*") if file.is_file())
    if not kinds:
        return "there is no file in it: give another data.path"
    return f"for the commonest kind in it, type data.pattern='**/*{kinds.most_common(1)[0][0]}'"


def _neighbour(key: str, path: pathlib.Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {key}={path.with_name(near[0])}?" if near else "; give a file or folder that exists"
