"""What to recompute and when: the user's wish, before it becomes ops."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass, field
from typing import TypeVar

_T = TypeVar("_T", bound=enum.StrEnum)


class Mode(enum.StrEnum):
    """When R runs. The numbers are identical in all four; time and memory are not."""

    NEVER = "never"  # nowhere: sets are kept
    INLINE = "inline"  # when its gradient has arrived, just before its B
    EARLY = "early"  # as its own op on the compute lane, before the wait for its gradient
    OVERLAP = "overlap"  # as its own op on its own lane


class LastStage(enum.StrEnum):
    """What the last stage does, which has nothing to wait for between F and B."""

    AUTO = "auto"  # F0 B0 F1 B1 ...: no R, one set held
    ALWAYS = "always"  # R there too, as the peers do


FIRST, EVERY, OFF = "first", "every", "off"  # values of recompute.verify; a number is another


@dataclass(frozen=True)
class RecomputePolicy:
    """`ahead` recomputed sets alive at once and `keep` kept sets per stage; their sum bounds the sets of a stage.

    `verify`: on which microbatches R is compared with F: `first` (of each kind of step), `every`, `off`, or a number N (one
    microbatch every N steps, in turn). It changes no op, so two policies that differ in it alone are equal.
    """

    mode: Mode = Mode.OVERLAP
    ahead: int = 1
    keep: int = 0
    last_stage: LastStage = LastStage.AUTO
    verify: str | int = field(default=FIRST, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _choice("recompute.mode", self.mode, Mode))
        object.__setattr__(self, "last_stage", _choice("recompute.last_stage", self.last_stage, LastStage))
        if self.ahead < 1:
            raise ValueError(f"recompute.ahead={self.ahead}: at least 1 recomputed set must be alive for B to use it")
        if self.keep < 0:
            raise ValueError(f"recompute.keep={self.keep}: the number of sets kept per stage is 0 or more")
        object.__setattr__(self, "verify", _verify(self.verify))

    @staticmethod
    def of(value: str | RecomputePolicy) -> RecomputePolicy:
        """A policy from a mode's name, or the policy itself."""
        return value if isinstance(value, RecomputePolicy) else RecomputePolicy(mode=_choice("recompute", value, Mode))


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
