"""The keys of a configuration, read from the records: the type of each, its allowed values, and who may change it."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, Union

from pipetrain.config.limits import Limit, May
from pipetrain.config.problem import ConfigError, nearest, shown
from pipetrain.config.records import RunConfig
from pipetrain.config.secrets import check_name

_T = TypeVar("_T")
_R = TypeVar("_R", bound=Any)

# Keys of earlier versions, and what to use instead.
_GONE = {
    "recompute.ahead": "recompute.sets counts all activation slots of a stage now; recompute.ahead=a is recompute.sets=a "
    "recompute.keep=none",
}
_NAMES_OF_MANY = {int: "integers", str: "texts"}
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


@functools.cache
def _marked(record: Any = RunConfig, above: tuple[Any, ...] = ()) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every key by its dotted path, `model` as well as `model.name`: the type of its value, and the marks of the key and of its group."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    types_alone = typing.get_type_hints(record)
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        kind, marks = types_alone[name], (*above, *_marks(hint))
        found[name] = kind, marks
        if _is_record(kind):
            found |= {f"{name}.{path}": entry for path, entry in _marked(kind, marks).items()}
    return found


def keys(record: Any = RunConfig) -> dict[str, Any]:
    """Every key by its dotted path, with the type of its value; `model` as well as `model.name`."""
    return {path: kind for path, (kind, _) in _marked(record).items()}


def limits(record: Any = RunConfig) -> dict[str, Limit]:
    """The limit of each key, by its dotted path, if it may not have every value of its type."""
    return {path: mark for path, (_, marks) in _marked(record).items() for mark in marks if isinstance(mark, Limit)}


def guarded_keys(record: Any = RunConfig) -> list[str]:
    """The keys whose value a resumed run must keep: all but those marked `MayChange`, alone or with their group."""
    return [path for path, marks in _leaves(record) if May.RESUME not in marks]


@functools.cache
def phase_keys(record: Any = RunConfig) -> tuple[str, ...]:
    """The keys whose value a phase may change: those marked `PerPhase`, alone or with their group."""
    return tuple(path for path, marks in _leaves(record) if May.PHASE in marks)


def _leaves(record: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """The keys without the groups, with their marks."""
    return [(path, marks) for path, (kind, marks) in _marked(record).items() if not _is_record(kind)]


def with_value(record: _R, path: str, value: Any, called: str | None = None) -> _R:
    """The record with another value of the key `path`, checked against its type; `called`: the name of the key in a message.

    Raises:
        ConfigError: a value of the wrong type.
    """
    name, _, rest = path.partition(".")
    if rest:
        changed = with_value(getattr(record, name), rest, value, called or path)
    else:
        changed = _convert(called or path, value, typing.get_type_hints(type(record))[name])
    return dataclasses.replace(record, **{name: changed})


def check_limits(record: Any, prefix: str = "") -> None:
    """Checks the values of a record against the marks of its fields. `prefix` is the start of its keys, as in `optim.`.

    Raises:
        ConfigError: a value that its key may not have.
    """
    for path, limit in limits(record.__class__).items():
        problem = limit.problem(prefix + path, functools.reduce(getattr, path.split("."), record))
        if problem is not None:
            raise ConfigError(problem)


def _marks(hint: Any) -> tuple[Any, ...]:
    """The marks that `Annotated` adds to a type, or to a type of a union."""
    if typing.get_origin(hint) is Annotated:
        return (*hint.__metadata__, *_marks(hint.__origin__))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(mark for option in typing.get_args(hint) for mark in _marks(option))
    return ()


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def check_key(path: str, prefix: str = "") -> None:
    """Checks that a key exists. `prefix`: text before the key in a message, as in `phases[1].`.

    Raises:
        ConfigError: no record has this key; the message names the nearest, or that it is no place for code or secrets.
    """
    known = keys()
    if path in known or is_free(path):
        return
    check_name(path)
    if path in _GONE:
        raise ConfigError(f"{prefix}{path}: {_GONE[path]}")
    parent = path.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == parent]
    hint = nearest(path, siblings) or nearest(path, known, cutoff=0.7)
    if not hint and siblings:
        hint = f"; there are {', '.join(siblings)}"
    raise ConfigError(f"{prefix}{path}: there is no such key{hint}")


def is_free(path: str) -> bool:
    """Whether the key is within a mapping whose keys the user chooses, such as `model.args`."""
    return any(path.startswith(f"{key}.") and typing.get_origin(kind) is Mapping for key, kind in keys().items())


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
        if _is_record(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}={value}: this is a group with keys of its own ({', '.join(keys(kind))})")
            arguments[name] = build(kind, value, f"{path}.")
        else:
            arguments[name] = _convert(path, value, kind)
    return record(**arguments)


def _convert(path: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: an integer may be given for a float, and a list becomes a tuple."""
    allowed = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in allowed:
        fits, converted = _fit(value, option)
        if fits:
            return converted
    given = _NAMES.get(type(value), "a list" if isinstance(value, (list, tuple)) else "a group")
    raise ConfigError(
        f"{path}={shown(value)}: this is {given}; allowed is {' or '.join(map(_name, allowed))}"
        + (f"; for text write {path}=\"'{value}'\"" if str in allowed and isinstance(value, (int, float)) else "")
    )


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    if typing.get_origin(kind) is tuple:
        entries = typing.get_args(kind)
        if not isinstance(value, (list, tuple)):
            return False, None
        kinds = (entries[0],) * len(value) if entries[-1] is ... else entries
        fitted = [_fit(entry, kind) for entry, kind in zip(value, kinds)]
        return len(value) == len(kinds) and all(fits for fits, _ in fitted), tuple(entry for _, entry in fitted)
    if typing.get_origin(kind) is Mapping:
        return isinstance(value, Mapping), value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    return type(value) is kind, value


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Mapping:
        return "a group of keys, as in {width: 512}"
    if typing.get_origin(kind) is tuple:
        entries = typing.get_args(kind)
        if typing.get_origin(entries[0]) is Mapping:
            return "a list of groups of keys, as in [{key: value}, {key: value}]"
        count = "" if entries[-1] is ... else f"{len(entries)} "
        return f"a list of {count}{_NAMES_OF_MANY.get(entries[0], 'numbers')}"
    return _NAMES[kind]
