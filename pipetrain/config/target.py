"""Code that the user names: `module:function`, or a name that an installed package gives in one of its entry points."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from importlib.metadata import entry_points
from typing import Any

from pipetrain.config.problem import ConfigError, nearest

# Groups of entry points by which installed packages bring code, by kind.
SCHEDULES, OP_HANDLERS = "pipetrain.schedules", "pipetrain.op_handlers"
TRACKERS, ENGINES = "pipetrain.trackers", "pipetrain.engines"
_ALLOWED = "write MODULE:FUNCTION, as in my_package.models:make_layers"


def load_target(spelling: str) -> Any:
    """What `module:name` or `module.name` names. The current folder is searched first, as by `python -m`.

    Raises:
        ConfigError: the spelling names nothing, the module cannot be imported, or it has no such name.
    """
    module_name, _, name = spelling.partition(":") if ":" in spelling else spelling.rpartition(".")
    if not all(map(str.isidentifier, [*module_name.split("."), *name.split(".")])):
        raise ConfigError(f"{spelling}: names no function; {_ALLOWED}")
    current_folder_first()
    found: Any = _imported(module_name, spelling)
    for word in name.split("."):
        if not hasattr(found, word):
            public = sorted(key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key)))
            hint = nearest(word, public) or f"; there are {', '.join(public) or 'no functions'}"
            raise ConfigError(f"{spelling}: {module_name} has no {name!r}{hint}")
        found = getattr(found, word)
    return found


def current_folder_first() -> None:
    """Modules of the current folder are found before all others."""
    if sys.path[:1] not in ([""], [os.getcwd()]):
        sys.path.insert(0, os.getcwd())


def _imported(module_name: str, spelling: str) -> Any:
    try:
        importlib.invalidate_caches()  # a file may be younger than the last look into its folder
        return importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):  # its own code fails
            line = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"{spelling}: {module_name} cannot be imported: {type(error).__name__}: {line}"
            ) from error
        package, _, last = missing.rpartition(".")
        # Of all modules that could be meant, the user's own: among those of Python some name is always near.
        folders = getattr(sys.modules[package], "__path__", []) if package else [os.getcwd()]
        there = [module.name for module in pkgutil.iter_modules(folders)]
        where = package or f"{os.getcwd()} or in the installed packages"
        raise ConfigError(f"{spelling}: there is no module {last!r} in {where}{nearest(last, there)}") from error


def is_extension(value: str, group: str) -> bool:
    """Whether `value` is spelled `module:name`, or is a name that an installed package gives in the entry points of `group`."""
    return ":" in value or value in entry_points(group=group).names


def load_extension(key: str, value: str, group: str) -> Any:
    """What `key=value` stands for: `module:name`, or an entry point of `group`.

    Raises:
        ConfigError: it is neither, it is no function or class, it cannot be imported, or several packages give the same name.
    """
    spellings = {value} if ":" in value else {entry.value for entry in entry_points(group=group, name=value)}
    if len(spellings) != 1:
        names = ", ".join(sorted(entry_points(group=group).names)) or "none"
        told = f"packages give {' and '.join(sorted(spellings))} this name" if spellings else f"installed are {names}"
        raise ConfigError(f"{key}={value}: {told}; {_ALLOWED}")
    (spelling,) = spellings
    try:
        found = load_target(spelling)
    except ConfigError as error:
        raise ConfigError(f"{key}={error}" if spelling == value else f"{key}={value}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}={value}: is a {type(found).__name__}, and no function or class")
    return found
