"""The marks of the fields of the records: which values a key may have, and whether a resumed run or a phase may change it.

    steps: MayChange[Annotated[int, at_least(1)]] = 200  # optimizer steps

They are part of the type, for readers and for `schema.py`, which checks values against them. Type checkers ignore them.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

from pipetrain.config.problem import nearest, shown


@dataclass(frozen=True)
class Limit:
    """The values that a key may have; its type decides about null. `told` follows `key=value` in the message."""

    holds: Callable[[Any], object]  # true or false
    told: str
    choices: tuple[str, ...] = ()  # all allowed values, if they are a list: a message names the nearest
    most: float = math.inf  # the largest number, if it has its own message

    def problem(self, key: str, value: Any) -> str | None:
        """The message about `key=value`; None: it is allowed."""
        if isinstance(value, (int, float)) and self.most < value < math.inf:
            return f"{key}={value}: allowed is {self.most} at most"
        if value is None or (_is_finite(value) and self.holds(value)):
            return None
        if not _is_finite(value):
            _, _, allowed = self.told.partition("allowed is ")
            return f"{key}={shown(value)}: allowed is a finite number{allowed and ', ' + allowed}"
        return f"{key}={shown(value)}{self.told}{nearest(str(value), self.choices)}"


def is_date(text: str) -> bool:
    """Whether it is a day, as in 2026-11-25."""
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def at_least(least: float, *, most: float = math.inf) -> Limit:
    """A number of at least `least`, and at most `most`."""
    return Limit(lambda value: value >= least, f": allowed is {least} or more", most=most)


def more_than(bound: float, *, most: float = math.inf) -> Limit:
    """A number above `bound`, to `most`."""
    return Limit(lambda value: value > bound, f": allowed is more than {bound}", most=most)


def within(least: float, most: float) -> Limit:
    """A number from `least` to `most`."""
    return Limit(lambda value: least <= value <= most, f": allowed is from {least} to {most}")


def below_one(told: str) -> Limit:
    """A number from 0 to less than 1."""
    return Limit(lambda value: 0.0 <= value < 1.0, told)


def each(least: float, most: float, what: str) -> Limit:
    """A number from `least` to `most`, or a list of such numbers."""
    told = f": allowed is {what} from {least} to {most}, or a list of such numbers"
    return Limit(lambda value: all(least <= entry <= most for entry in _entries(value)), told)


def choice_of(*words: str) -> Limit:
    """One word of a list; the message about another word names the nearest."""
    return Limit(lambda value: value in words, f": allowed are {', '.join(words)}", choices=words)


def matching(pattern: str, allowed: str) -> Limit:
    """Text (or a number, as text) that the regular expression `pattern` matches as a whole."""
    return Limit(lambda value: re.fullmatch(pattern, str(value)), f": allowed is {allowed}")


def only(supported: object, instead: str) -> Limit:
    """A key of which this version supports one value."""
    told = f": not supported, only {shown(supported)} is; {instead}"
    return Limit(lambda value: value == supported, told)


class May(Enum):
    """Who may change a key, or all keys of a group."""

    RESUME = "a run that resumes from a snapshot"
    PHASE = "a phase of the run"


_T = TypeVar("_T")
MayChange = Annotated[_T, May.RESUME]  # a key without it keeps its value, on which the results depend
PerPhase = Annotated[_T, May.PHASE]  # a key without it has one value for the whole run


MOST_STAGES = 4096  # of a schedule, and so of ranks
_LARGEST = 2**63 - 1  # the largest integer that torch takes
Count = Annotated[int, at_least(1, most=_LARGEST)]
Stages = Annotated[int, at_least(1, most=MOST_STAGES)]
Amount = Annotated[int, at_least(0, most=_LARGEST)]
Size = Annotated[int, at_least(1, most=2**31 - 1)]
Name = Annotated[str, matching(r"[\w.@,:+-]+", "a name without spaces")]


def _is_finite(value: object) -> bool:
    """Whether the value is not inf or nan, and no list with one of them. Text is finite."""
    return all(math.isfinite(entry) for entry in _entries(value) if isinstance(entry, float))


def _entries(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
