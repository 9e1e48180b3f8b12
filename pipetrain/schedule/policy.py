"""What to recompute and when: the user's wish, before it becomes ops."""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

_T = TypeVar("_T", bound=enum.StrEnum)

PerStage = int | tuple[int, ...]  # a number for all stages, or one for each


class Mode(enum.StrEnum):
    """When R runs. The numbers are identical in all four; time and memory are not."""

    NEVER = "never"  # nowhere: sets are kept
    INLINE = "inline"  # when its gradient has arrived, just before its B
    EARLY = "early"  # as its own op on the compute lane, before the wait for its gradient
    OVERLAP = "overlap"  # as its own op on its own lane


class Keep(enum.StrEnum):
    """Whether named families use places for sets that stay from F to B."""

    NONE = "none"  # but for those whose B comes right after their F
    AUTO = "auto"  # where that is faster and a place is free


class LastStage(enum.StrEnum):
    """What the last stage does, which has nothing to wait for between F and B."""

    AUTO = "auto"  # F0 B0 F1 B1 ...: no R, one set held
    ALWAYS = "always"  # R there too, as the peers do


# An entry of recompute.selective: layers (2, 0-3, 2.attention, 0-3.mlp), an operation, or both with a colon between them.
_LAYERS = r"(?P<first>\d+)(?:-(?P<last>\d+))?(?:\.(?P<path>[\w.]+))?"
_OP = r"[A-Za-z_]\w*(?:(?:::|\.)\w+)*"
_OUTPUTS = re.compile(rf"{_LAYERS}(?::(?P<there>{_OP}))?|(?P<op>{_OP})")


@dataclass(frozen=True)
class Outputs:
    """Outputs that stay from F to B: of the operations named `op` (`matmul`, `attention`, or as torch names one; None: both words), in
    the model's layers from `first` to `last` (None: in all), there in the submodule `path` ("": anywhere)."""

    op: str | None = None
    first: int | None = None
    last: int | None = None
    path: str = ""

    @staticmethod
    def parse(text: object) -> Outputs:
        """Raises:
        ValueError: it is no such entry.
        """
        found = _OUTPUTS.fullmatch(str(text))
        first, last = (int(number) if number else None for number in found.group("first", "last")) if found else (0, 0)
        if not found or (first is not None and last is not None and last < first):
            raise ValueError(
                f"recompute.selective={text}: allowed are matmul, attention, an operation's name (mm), layers (3, 0-5, 3.mlp), and both "
                "together (0-5:attention), or a list of such"
            )
        return Outputs(found["op"] or found["there"], first, first if last is None else last, found["path"] or "")

    def __str__(self) -> str:
        if self.first is None:
            return self.op or ""
        layers = str(self.first) if self.last == self.first else f"{self.first}-{self.last}"
        return layers + (f".{self.path}" if self.path else "") + (f":{self.op}" if self.op else "")


FIRST, EVERY, OFF = "first", "every", "off"  # values of recompute.verify; a number is another


@dataclass(frozen=True)
class RecomputePolicy:
    """What is recomputed, and how much a stage may hold at once.

    `sets` places per stage, a number or one per stage, are one pool: a set takes one from its F, where it is kept, or
    else from its R, to the end of its backward; an R that finds none waits. `keep` says whether named families keep sets in
    places that are free; None: `none` with one place per stage, so that `inline` is what others do, `auto` with more.
    `stash` is the most microbatches that a stage may hold between F and the end of their backward, kept ones
    included; None: any number.

    `selective`: which outputs stay from F to B although R runs, which then does not compute them; entries as `Outputs.parse` reads them.

    `verify`: on which microbatches R is compared with F: `first` (of each kind of step), `every`, `off`, or a number N (one
    microbatch every N steps, in turn). It changes no op, so two policies that differ in it alone are equal.

    Raises:
        ValueError: a value that its key may not have; the message names the key, the value and what is allowed.
    """

    mode: Mode = Mode.OVERLAP
    sets: PerStage = 1
    keep: Keep | None = None
    stash: PerStage | None = None
    last_stage: LastStage = LastStage.AUTO
    selective: tuple[Outputs, ...] = ()
    verify: str | int = field(default=FIRST, compare=False, repr=False)
    ahead: InitVar[int | None] = None  # of before there was one pool: refused

    def __post_init__(self, ahead: int | None) -> None:
        if ahead is not None:
            raise ValueError(
                f"recompute.ahead={ahead}: the places of a stage are one pool now; use recompute.sets={ahead} with "
                "recompute.keep=none for as many recomputed sets alive at once"
            )
        object.__setattr__(self, "mode", _choice("recompute.mode", self.mode, Mode))
        object.__setattr__(self, "sets", _numbers("recompute.sets", self.sets, "a stage needs a place for its B's set"))
        if self.keep is not None:
            object.__setattr__(self, "keep", _keep(self.keep))
        if self.stash is not None:
            reason = "a stage holds a microbatch from its F to its B"
            object.__setattr__(self, "stash", _numbers("recompute.stash", self.stash, reason))
        object.__setattr__(self, "last_stage", _choice("recompute.last_stage", self.last_stage, LastStage))
        object.__setattr__(self, "selective", _outputs(self.selective))
        object.__setattr__(self, "verify", _verify(self.verify))

    @staticmethod
    def of(value: str | RecomputePolicy) -> RecomputePolicy:
        """A policy from a mode's name, or the policy itself."""
        return value if isinstance(value, RecomputePolicy) else RecomputePolicy(mode=_choice("recompute", value, Mode))

    @property
    def keeps(self) -> bool:
        """Whether named families keep sets where a place is free."""
        return self.most_sets > 1 if self.keep is None else self.keep is Keep.AUTO

    @property
    def most_sets(self) -> int:
        """The places of the stage that has most."""
        return self.sets if isinstance(self.sets, int) else max(self.sets)

    def places_of(self, stage: int) -> int | None:
        """Sets of `stage` that may be alive at once; None: any number."""
        if self.mode is Mode.NEVER:
            return None
        return self.sets if isinstance(self.sets, int) else self.sets[stage]

    def stash_of(self, stage: int) -> int | None:
        """Microbatches that `stage` may hold between F and the end of their backward; None: any number."""
        return self.stash if self.stash is None or isinstance(self.stash, int) else self.stash[stage]

    def check_layers(self, num_layers: int) -> None:
        """Raises:
        ValueError: `selective` names a layer that a model of so many has not.
        """
        for one in self.selective:
            if one.last is not None and one.last >= num_layers:
                raise ValueError(
                    f"recompute.selective={one}: the model has the layers 0 to {num_layers - 1}; name some of these"
                )

    def check_stages(self, num_stages: int) -> None:
        """Raises:
        ValueError: a list that has not one number for each of `num_stages` stages.
        """
        for key, value in (("sets", self.sets), ("stash", self.stash)):
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ValueError(
                    f"recompute.{key}={list(value)} has {len(value)} numbers for {num_stages} stages; give one number, or "
                    f"{num_stages} (one per stage)"
                )


def _numbers(key: str, value: PerStage | Sequence[int], reason: str) -> PerStage:
    """A number, 1 or more, or a tuple of them, one per stage."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    shown = list(numbers) if is_list else value
    if not numbers or any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ValueError(f"{key}={shown!r}: allowed is a whole number, 1 or more, or a list with one per stage")
    if min(numbers) < 1:
        raise ValueError(f"{key}={shown}: allowed is 1 or more, for {reason}")
    return numbers if is_list else numbers[0]


def _outputs(value: object) -> tuple[Outputs, ...]:
    if value is None:
        return ()
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(one if isinstance(one, Outputs) else Outputs.parse(one) for one in entries)


def _keep(value: object) -> Keep:
    if isinstance(value, int):
        raise ValueError(
            f"recompute.keep={value}: allowed are none and auto; how many sets a stage may hold is recompute.sets, and "
            f"{value} kept beside a recomputed one are recompute.sets={value + 1}"
        )
    return _choice("recompute.keep", str(value), Keep)


def _verify(value: str | int) -> str | int:
    if value in (FIRST, EVERY, OFF):
        return value
    # A command line gives a number as text.
    if not isinstance(value, bool) and str(value).isdecimal() and int(value) >= 1:
        return int(value)
    raise ValueError(
        f"recompute.verify={value!r}: allowed are {FIRST}, {EVERY}, {OFF}, or a number N: one microbatch is proved every N steps"
    )


def _choice(key: str, value: str, choices: type[_T]) -> _T:
    try:
        return choices(value)
    except ValueError:
        nearest = difflib.get_close_matches(str(value), [choice.value for choice in choices], n=1, cutoff=0.0)
        hint = f"; did you mean {str(nearest[0])!r}?" if nearest else ""
        raise ValueError(f"{key}={value!r}: allowed are {', '.join(choices)}{hint}") from None
