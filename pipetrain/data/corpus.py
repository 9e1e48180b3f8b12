"""Which files a corpus is made of: found, not yet read."""

from __future__ import annotations

import collections
import difflib
import os
import pathlib
import sysconfig

from pipetrain.config.records import DataConfig

# Folders of the standard library that are not it: what was installed later, and its tests (huge, repetitive, often left out).
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def find_files(config: DataConfig) -> list[pathlib.Path]:
    """The files of the corpus that `data.name` names, in an order that is the same on every machine; at least one.

    Raises ValueError where there is none, or one that may not be read.
    """
    if config.name not in _CORPORA:
        nearest = difflib.get_close_matches(config.name, _CORPORA, n=1, cutoff=0.0)[0]
        raise ValueError(f"data={config.name!r}: allowed are {', '.join(_CORPORA)}; did you mean data={nearest}?")
    files = _CORPORA[config.name](config)
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{key_of_text(config)}: {file} may not be read; allow it with: chmod +r {file}")
    return files


def _stdlib_files(config: DataConfig) -> list[pathlib.Path]:
    """The running Python's own library: real text on every machine, without a download."""
    if config.path is not None:
        raise ValueError(f"data.path={config.path} is for your own text: type data=text data.path={config.path}")
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [file for file in _sorted_files(root, "**/*.py") if not _NOT_STDLIB & set(file.relative_to(root).parts)]
    if not files:
        raise ValueError(f"data=stdlib: no Python sources in {root}; use your own text: data=text data.path=FOLDER")
    return files


def _text_files(config: DataConfig) -> list[pathlib.Path]:
    """One file, or the files of a folder that match `data.pattern`."""
    if not config.path:
        raise ValueError(
            "data.path is not set: data=text reads a file or a folder of text; type data.path=FILE_OR_FOLDER"
        )
    path = pathlib.Path(config.path).expanduser()
    if not path.exists():
        raise ValueError(f"data.path={config.path} is not there (seen from {pathlib.Path.cwd()}){_neighbour(path)}")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"data.path={config.path} is neither a file nor a folder: give one that is")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ValueError(f"data.path={config.path} may not be read; allow it with: chmod +rx {config.path}")
    files = _matching_files(path, config.pattern)
    if not files:
        raise ValueError(
            f"data.pattern={config.pattern!r} matches no file in data.path={config.path}; {_what_is_in(path)}"
        )
    return files


_CORPORA = {"stdlib": _stdlib_files, "text": _text_files}


def _matching_files(root: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    try:
        return _sorted_files(root, pattern)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"data.pattern={pattern!r} is no pattern inside a folder ({error}); allowed are globs such as '**/*.txt' or '*.md'"
        ) from None


def _sorted_files(root: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    return sorted(
        (file for file in root.glob(pattern) if file.is_file()), key=lambda file: file.relative_to(root).as_posix()
    )


def _what_is_in(folder: pathlib.Path) -> str:
    kinds = collections.Counter(file.suffix for file in folder.rglob("*") if file.is_file())
    if not kinds:
        return "there is no file in it: give another data.path"
    return f"for the commonest kind in it, type data.pattern='**/*{kinds.most_common(1)[0][0]}'"


def _neighbour(path: pathlib.Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean data.path={path.with_name(near[0])}?" if near else "; give a file or folder that exists"


def key_of_text(config: DataConfig) -> str:
    """What the user typed to choose the text, for messages."""
    return f"data={config.name}" if config.path is None else f"data.path={config.path}"
