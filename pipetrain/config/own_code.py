"""The user's own code in a configuration: which keys go with it, the digest of its file, and how it is called.

A target is typed, or stands in the user's own configuration; nobody takes it from a run folder. Finding its file imports nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from pipetrain.config.problem import ConfigError
from pipetrain.config.records import PYTHON, RunConfig
from pipetrain.config.target import current_folder_first, load_target

# The keys that apply to the user's own code; all others of the group are of other models and data.
_OF_BOTH = ("name", "target", "args", "file_sha256")
_APPLY = {
    "model": (*_OF_BOTH, "loss", "loss_args", "count", "count_args", "compile"),
    "data": (*_OF_BOTH, "heldout_target", "heldout_args", "collate", "num_workers", "global_batch_size"),
}
_MISSING = {
    "model": "the function that gives your layers; type model.target=my_package.models:make_layers",
    "data": "the function that gives your dataset; type data.target=my_package.data:make_dataset",
}


def with_own_code(config: RunConfig, typed: Sequence[str], tell: Callable[[str], object]) -> RunConfig:
    """The configuration with the digest of the user's files, and without the keys of the experiment that do not apply to them.

    `typed`: keys that the user typed; `tell` gets a line about ignored ones.

    Raises:
        ConfigError: a typed key does not apply, or there is no target.
    """
    groups = {name: _own(name, getattr(config, name), config.experiment, typed, tell) for name in _APPLY}
    return replace(config, **groups)


def _own(group: str, record: Any, experiment: str, typed: Sequence[str], tell: Callable[[str], object]) -> Any:
    default, apply = type(record)(), _APPLY[group]
    if record.name != PYTHON:
        for key in apply:
            if getattr(record, key) != getattr(default, key) and key not in ("name", "compile", "global_batch_size"):
                raise ConfigError(
                    f"{group}.{key}={getattr(record, key)}: is of {group}=python, and this is {group}={record.name}; type {group}=python"
                )
        return record
    if record.target is None:
        raise ConfigError(f"{group}.target is not set: {group}=python takes {_MISSING[group]}")
    for key in typed:
        top, _, name = key.partition(".")
        if top == group and name.partition(".")[0] not in apply:
            raise ConfigError(
                f"{key}: does not apply to {group}=python; give your function its own, as in {group}.args.width=512"
            )
    others = [field.name for field in fields(record) if field.name not in apply]
    ignored = [f"{group}.{name}" for name in others if getattr(record, name) != getattr(default, name)]
    if ignored and experiment != RunConfig.experiment:  # nobody typed the default one
        tell(f"experiment={experiment}: {', '.join(ignored)} do not apply to {group}=python, so they are ignored")
    own = {name: getattr(default, name) for name in others}
    return replace(record, **own, file_sha256=record.file_sha256 or code_digest(f"{group}.target", record.target))


def code_digest(key: str, spelling: str) -> str:
    """SHA-256 of the file of the module that `spelling` names, in hex. Imports the module only if its file cannot be read.

    Raises:
        ConfigError: there is no such module, or no file.
    """
    module_name = spelling.partition(":")[0] if ":" in spelling else spelling.rpartition(".")[0]
    current_folder_first()
    try:
        file = _file_of(module_name)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        _loaded(key, spelling)  # which says what is wrong with it
        raise ConfigError(f"{key}={spelling}: the file of {module_name} cannot be read ({error})") from error


def _file_of(module_name: str) -> str:
    first, *rest = module_name.split(".")
    spec: ModuleSpec | None = importlib.util.find_spec(first) if first else None
    for name in rest:
        spec = spec and PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    if spec is None or spec.origin is None:
        raise ValueError("there is no such module")
    return spec.origin


def check_target(key: str, spelling: str, args: Mapping[str, Any]) -> None:
    """Checks that there is such a function and that it takes `args`; it is not called. Raises ConfigError otherwise."""
    _check_arguments(key, spelling, _loaded(key, spelling), args)


def call_target(key: str, spelling: str, args: Mapping[str, Any]) -> Any:
    """What the function or class returns for `args`, in which `_target_` makes objects as `hydra.utils.instantiate` does.

    Raises:
        ConfigError: there is no such function, the arguments are not its own, or it raises.
    """
    found = _loaded(key, spelling)
    arguments = _instantiated(key, spelling, args)
    _check_arguments(key, spelling, found, arguments)
    try:
        return found(**arguments)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{key}={spelling}: raises {told_of(error)}") from error


def function_of(key: str, spelling: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, with `args` as more arguments; a class is called with them, and gives the function.

    Raises:
        ConfigError: see `call_target`.
    """
    found = _loaded(key, spelling)
    function: Callable[..., Any] = (
        call_target(key, spelling, args)
        if inspect.isclass(found)
        else functools.partial(found, **_instantiated(key, spelling, args))
    )
    return function


def told_of(error: BaseException) -> str:
    """An error of the user's code in one line, with the line of code that raised it."""
    text = (str(error).strip().splitlines() or [""])[0]
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}, line {where[0].lineno})" if where else ""
    return f"{type(error).__name__}: {text}{place}"


def _loaded(key: str, spelling: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = load_target(spelling)
    except ConfigError as error:
        raise ConfigError(f"{key}={error}") from error
    if not callable(found):
        raise ConfigError(f"{key}={spelling}: is a {type(found).__name__}, not a function or class")
    return found


def _instantiated(key: str, spelling: str, args: Mapping[str, Any]) -> dict[str, Any]:
    from hydra.utils import instantiate  # not where plans are made: it is slow to load

    if "_target_" in args:
        raise ConfigError(
            f"{key}={spelling}: its arguments have _target_={args['_target_']} themselves; type {key}={args['_target_']}"
        )
    try:
        made: dict[str, Any] = instantiate(dict(args), _convert_="all")
    except Exception as error:  # whatever the user's code raises
        text = ", ".join(line.strip() for line in str(error).strip().splitlines())
        raise ConfigError(f"{key}={spelling}: an argument cannot be made: {text}") from error
    return made


def _check_arguments(key: str, spelling: str, found: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # of a class or function of C, which says it itself
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        args = f"{key.partition('.')[0]}.args" if key.endswith(".target") else f"{key.removesuffix('_target')}_args"
        raise ConfigError(f"{key}={spelling}: {error}; it takes {signature}: set them as {args}.NAME=VALUE") from error
