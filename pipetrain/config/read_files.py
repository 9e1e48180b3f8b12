"""Files that somebody else may have made: opened without waiting, read within limits, and refused in one sentence where they are damaged.

    path ──► regular file, small enough ──► bytes ──► JSON or YAML, not too deep ──► a record, each value of its field's type

Nothing here loads torch.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import stat
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

from pipetrain.config.problem import opening_line

# Of values inside values: Python's own limit is about 1,000, and so many would stop what reads them later.
MOST_DEPTH = 64
MOST_BYTES = 2**28  # of a JSON file: the index of a model with 100,000 weights has 10 MB
MOST_YAML_BYTES = 2**18  # YAML is read a hundred times as slowly
_MOST_WHOLE = 2**63  # beyond it a number is no count of anything, and cannot be shown as a decimal

_Record = TypeVar("_Record")


def shipped(folder: str) -> Path:
    """A folder of ours that is no module: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / folder if (package / folder).is_dir() else package.parent / folder


class DamagedFile(ValueError):
    """A file that is not what it should be: the message gives its path, what is wrong with it, and what to do."""

    def __init__(self, path: Path, what: object, todo: str) -> None:
        super().__init__(f"{path} cannot be read ({opening_line(what)}); {todo}")


def check_regular(path: Path, todo: str) -> int:
    """The size of a file in bytes, links followed. Raises DamagedFile: it is missing, or no regular file: opening a pipe would wait."""
    try:
        status = path.stat()
    except OSError as error:
        raise DamagedFile(path, error.strerror, todo) from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(path, "it is no regular file", todo)
    return status.st_size


def read_bytes(path: Path, todo: str, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file. `todo` ends the message of an error. Raises DamagedFile: it cannot be read, or has more than `most_bytes`."""
    check_regular(path, todo)  # before it is opened: to open a device may do something
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was replaced meanwhile
                raise DamagedFile(path, "it is no regular file", todo)
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise DamagedFile(path, error.strerror, todo) from error
    if len(data) > most_bytes:
        raise DamagedFile(path, f"it has more than {most_bytes:,} bytes", todo)
    return data


def read_text(path: Path, todo: str, most_bytes: int = MOST_BYTES) -> str:
    """A regular file as UTF-8. Raises DamagedFile: as `read_bytes`, or it is no text."""
    try:
        return read_bytes(path, todo, most_bytes).decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "it is not UTF-8", todo) from error


def read_json(path: Path, todo: str) -> Any:
    """The value of a JSON file. Raises DamagedFile: it cannot be read, or is not JSON within the limits."""
    data = read_bytes(path, todo)
    try:
        return parse_json(data)
    except ValueError as error:
        raise DamagedFile(path, error, todo) from error


def read_object(path: Path, todo: str) -> dict[str, Any]:
    """Likewise, where the value is an object."""
    value = read_json(path, todo)
    if not isinstance(value, dict):
        raise DamagedFile(path, "it holds no JSON object", todo)
    return value


def read_record(kind: type[_Record], path: Path, todo: str) -> _Record:
    """The JSON file of a dataclass. Raises DamagedFile: it cannot be read, or a value is of another type than its field."""
    value = read_json(path, todo)
    try:
        record: _Record = fitted(kind, value)
    except ValueError as error:
        raise DamagedFile(path, error, todo) from error
    return record


def parse_json(text: str | bytes) -> Any:
    """The value of JSON. Raises ValueError: it is none, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} values") from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MOST_DEPTH:  # type: ignore[arg-type]
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]  # without recursion, whatever limit of it is set
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MOST_DEPTH} values")


def _inside(value: Any) -> list[Any]:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in held if isinstance(one, (dict, list))]


def read_yaml_text(path: Path, todo: str) -> str:
    """A YAML file as text, which a YAML reader can take without harm. Raises DamagedFile: it cannot be read, is too deep, or has aliases.

    An alias is a value that is written once and used often: some hundred bytes may stand for gigabytes.
    """
    import yaml

    text = read_text(path, todo, MOST_YAML_BYTES)
    depth = 0
    try:
        for event in yaml.parse(text):
            if isinstance(event, yaml.AliasEvent):
                raise DamagedFile(path, f"line {event.start_mark.line + 1} has the alias *{event.anchor}", todo)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise DamagedFile(path, f"it is nested deeper than {MOST_DEPTH} values", todo)
    except yaml.YAMLError as error:
        raise DamagedFile(path, " ".join(str(error).split()), todo) from error
    return text


@contextmanager
def opened_tensors(path: Path, todo: str, **how: Any) -> Iterator[Any]:
    """A safetensors file, opened by `safe_open` with `how`. Raises DamagedFile: it is none; also where a tensor in it cannot be read."""
    from safetensors import SafetensorError, safe_open

    check_regular(path, todo)
    try:
        with safe_open(path, **how) as file:
            yield file
    except (OSError, SafetensorError, OverflowError) as error:
        raise DamagedFile(path, f"it is no safetensors file: {error}", todo) from error


# Values of a record ----------------------------------------------------------------------------------------------------


def fitted(kind: Any, value: Any, name: str = "it") -> Any:
    """`value`, as JSON has it, as a `kind`: a dataclass, tuple, mapping, number, text, or one of several. `name`: of the value, in a message.

    Raises:
        ValueError: it is of another type, or a record has a key too many or too few.
    """
    kind = kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, name)
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer in (Union, types.UnionType):
        return _one_of(inner, value, name)
    if outer in (tuple, list, frozenset, Sequence) and isinstance(value, list):
        kinds = (inner[0],) * len(value) if outer is not tuple or inner[-1] is ... else inner
        if len(kinds) == len(value):
            entries = (fitted(kind, entry, f"{name}[{place}]") for place, (kind, entry) in enumerate(zip(kinds, value)))
            return outer(entries) if outer in (list, frozenset) else tuple(entries)
    elif outer in (dict, Mapping) and isinstance(value, dict):
        return {key: fitted(inner[1], entry, f"{name}.{key}") for key, entry in value.items()}
    elif isinstance(kind, type) and _is_plain(kind, value):
        return kind(value) if issubclass(kind, enum.Enum) else value
    raise ValueError(f"{name} is {_shown(value)}")


def _record(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}")
    hints = typing.get_type_hints(kind)
    given = {key: fitted(hints[key], entry, key) for key, entry in value.items() if key in hints}
    if unknown := next((key for key in value if key not in hints), None):
        raise ValueError(f"{unknown!r} is unknown")
    try:
        return kind(**given)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error).rpartition(") ")[2]) from None


def _one_of(kinds: Sequence[Any], value: Any, name: str) -> Any:
    *others, last = kinds
    for kind in others:
        with suppress(ValueError):
            return fitted(kind, value, name)
    return fitted(last, value, name)


def _is_plain(kind: type, value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return kind in (int, float) and abs(value) < _MOST_WHOLE
    if issubclass(kind, enum.Enum):
        return value in [one.value for one in kind]
    return type(value) is kind or (value is None and kind is types.NoneType)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
