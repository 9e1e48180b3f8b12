"""The marks that stand beside a field of the records: which values it may have, and whether a run that goes on may change it.

    steps: MayChange[Annotated[int, at_least(1)]] = 200  # optimizer steps

They are part of the type for readers and for `schema.py`, which checks values by them; Python's own types do not see them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

from pipetrain.config.problem import nearest


@dataclass(frozen=True)
class Limit:
    """The values that a key may have; null is left to its type unless `of_null`. `told` follows `key=value` in the message."""

    holds: Callable[[Any], object]  # true or false
    told: str
    choices: tuple[str, ...] = ()  # where these are all: the nearest is named
    of_null: bool = False

    def problem(self, key: str, value: Any) -> str | None:
        """What to tell a user of `key=value`; None: it is allowed."""
        if (value is None and not self.of_null) or (self.holds(value) and not _is_infinite(value)):
            return None
        told = self.told.replace("allowed is ", "allowed is a finite number, ") if _is_infinite(value) else self.told
        return f"{key}={_shown(value)}{told}{nearest(str(value), self.choices)}"


def at_least(least: float, told: str = ": allowed is {} or more") -> Limit:
    """A number from `least` on."""
    return Limit(lambda value: value >= least, told.format(least))


def more_than(bound: float, told: str = ": allowed is more than {}") -> Limit:
    """A number above `bound`."""
    return Limit(lambda value: value > bound, told.format(bound))


def within(least: float, most: float) -> Limit:
    """A number from `least` to `most`."""
    return Limit(lambda value: least <= value <= most, f": allowed is from {least} to {most}")


def one_of(*words: str) -> Limit:
    """One of two or three words."""
    return Limit(lambda value: value in words, f": allowed is {', '.join(words[:-1])} or {words[-1]}")


def choice_of(*words: str) -> Limit:
    """One word of a list; the nearest is named to who mistypes."""
    return Limit(lambda value: value in words, f": allowed are {', '.join(words)}", choices=words)


def matching(pattern: str, allowed: str) -> Limit:
    """Text (or a number, as text) that the regular expression `pattern` matches as a whole."""
    return Limit(lambda value: re.fullmatch(pattern, str(value)), f": allowed is {allowed}")


def only(supported: object, instead: str) -> Limit:
    """A key of which this version supports one value."""
    told = f": not supported, only {_shown(supported)} is; {instead}"
    return Limit(lambda value: value == supported, told, of_null=True)


class Resume(Enum):
    """What a run that goes on from a snapshot may do with a key, or with all keys of a group."""

    MAY_CHANGE = "may change"


_T = TypeVar("_T")
MayChange = Annotated[_T, Resume.MAY_CHANGE]  # a key without it keeps its value: it is part of what the run computes


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
