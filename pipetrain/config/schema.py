"""The keys of a configuration and the type of each, read off the records."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipetrain.config.problem import ConfigError, nearest
from pipetrain.config.records import RunConfig
from pipetrain.config.secrets import check_name

_T = TypeVar("_T")
_NAMES_OF_MANY = {int: "integers", str: "texts"}
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def keys(record: Any = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every key by its dotted path, with the type of its value; `model` as well as `model.name`."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(record).items():
        found[prefix + name] = kind
        if dataclasses.is_dataclass(kind):
            found |= keys(kind, f"{prefix}{name}.")
    return found


def check_key(path: str) -> None:
    """Raises:
    ConfigError: no record has this key; the message names the nearest, or that it is no place for code or secrets.
    """
    known = keys()
    if path in known:
        return
    check_name(path)
    parent = path.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == parent]
    hint = nearest(path, siblings) or nearest(path, known, cutoff=0.7)
    if not hint and siblings:
        hint = f"; there are {', '.join(siblings)}"
    raise ConfigError(f"{path}: there is no such key{hint}")


def build(record: Callable[..., _T], values: Mapping[str, Any], prefix: str = "") -> _T:
    """The record from plain values, each checked against the type of its field.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    hints = typing.get_type_hints(record)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        check_key(path)
        kind: Any = hints[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}={value}: this is a group with keys of its own ({', '.join(keys(kind))})")
            nested = typing.cast(Callable[..., Any], kind)
            arguments[name] = build(nested, value, f"{path}.")
        else:
            arguments[name] = _convert(path, value, kind)
    return record(**arguments)


def _convert(path: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: numbers stay what they are, an integer may stand for a float, a list becomes a tuple."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in allowed:
        fits, converted = _fit(value, option)
        if fits:
            return converted
    raise ConfigError(
        f"{path}={_shown(value)}: this is {_name_of_value(value)}; allowed is {' or '.join(map(_name, allowed))}"
        + (f"; for text write {path}=\"'{value}'\"" if str in allowed and isinstance(value, (int, float)) else "")
    )


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    if typing.get_origin(kind) is tuple:
        return _fit_tuple(value, typing.get_args(kind))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    return type(value) is kind, value


def _fit_tuple(value: Any, entries: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    kinds = (entries[0],) * len(value) if entries[-1] is ... else entries
    fitted = [_fit(entry, kind) for entry, kind in zip(value, kinds)]
    return len(value) == len(kinds) and all(fits for fits, _ in fitted), tuple(entry for _, entry in fitted)


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        entries = typing.get_args(kind)
        count = "" if entries[-1] is ... else f"{len(entries)} "
        return f"a list of {count}{_NAMES_OF_MANY.get(entries[0], 'numbers')}"
    return _NAMES[kind]


def _name_of_value(value: Any) -> str:
    return _NAMES.get(type(value), "a list" if isinstance(value, (list, tuple)) else "a group")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
