"""Messages about a configuration that cannot run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A mistake in the configuration: the message names the key, the value, what is allowed and what to type."""


_REPLACED = {"deepspeed_fused_adam": "adamw", "optim.lr": "optim.learning_rate"}  # a former value, another tool's key


def nearest(text: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean 'x'?` with the choice most similar to `text`, or nothing if none is similar."""
    found = difflib.get_close_matches(_REPLACED.get(text, text), list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def choice_error(key: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a value outside a closed list."""
    allowed = list(choices)
    return ConfigError(f"{key}={value}: allowed are {', '.join(allowed)}{nearest(str(value), allowed)}")


def opening_line(what: object) -> str:
    """The first line of a text or an error; of an empty one, the name of its type."""
    return (str(what).strip().splitlines() or [type(what).__name__])[0]


def shown(value: object) -> str:
    """A value as it is written in a configuration."""
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
