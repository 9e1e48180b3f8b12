"""How much each microbatch counts in the loss, and which count nothing: those are run by no rank."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipetrain.runtime.cut import cut, num_rows

CountFn = Callable[[Any], Any]
"""What of a microbatch's target counts in the loss: a number, 0 or more."""


def counts_of(targets: Sequence[Any], count_fn: CountFn) -> list[int | float]:
    """What `count_fn` says of the target of each microbatch.

    Raises:
        ValueError: it says no number, or it fails; the message has the microbatch.
    """
    return [_count(number, target, count_fn) for number, target in enumerate(targets)]


def _count(microbatch: int, target: Any, count_fn: CountFn) -> int | float:
    try:
        found = count_fn(target)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"count_fn failed on the target of microbatch {microbatch}: {reason}") from error
    value = _as_number(found.item() if isinstance(found, Tensor) and found.dim() == 0 else found)
    if value is not None and 0 <= value < math.inf:
        return value
    shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) and found.dim() else repr(found)
    raise ValueError(
        f"count_fn gave {shown} for the target of microbatch {microbatch}: it must return how much of it counts in the "
        "loss, an int, a float or a 0-dim tensor, finite and 0 or more"
    )


def _as_number(value: Any) -> int | float | None:
    # True is a number for Python, and as a count most likely an any() where a sum() was meant.
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):  # numpy's too
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


@dataclass(frozen=True)
class Counted:
    """What the rank of the last stage has found in the targets of a call; with a `problem` the counts say nothing."""

    rows: int | None = None  # of the targets; None where no tensor of them is cut
    counts: tuple[int | float, ...] = ()
    problem: ValueError | TypeError | None = None


def count_targets(targets: Any, most_microbatches: int, count_fn: CountFn, *, all_of_them: bool) -> Counted:
    """Cut the targets of a call and count each microbatch: `most_microbatches`, or fewer where there are fewer rows, unless
    `all_of_them` are wanted."""
    rows = None
    try:
        rows = num_rows(targets, "targets")
        wanted = most_microbatches if all_of_them or rows is None else max(1, min(most_microbatches, rows))
        counts = counts_of(cut(targets, wanted, "targets"), count_fn)
    except (ValueError, TypeError) as problem:
        return Counted(rows, problem=problem)
    return Counted(rows, tuple(counts))
