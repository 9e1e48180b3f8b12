"""What is said to a user whose configuration cannot work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A mistake in the configuration: the message names the key, the value, what is allowed and what to type."""


_REPLACED = {"deepspeed_fused_adam": "adamw"}  # what is no longer offered, and what does the same


def nearest(text: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean 'x'?` with the choice that looks most like `text`, or nothing where none does."""
    found = difflib.get_close_matches(_REPLACED.get(text, text), list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def shown(value: object) -> str:
    """A value as a configuration has it."""
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
