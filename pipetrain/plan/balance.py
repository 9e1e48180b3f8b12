"""How many layers each stage gets."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from pipetrain.schedule.policy import CutStage

_HALVINGS = 50
_ROUNDING = 1 + 1e-9


def balance_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers per stage, the remainder to the last stages.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} stages (pipeline.num_stages): each stage needs a layer; "
            f"use at most {num_layers} stages"
        )
    share, rest = divmod(num_layers, num_stages)
    return tuple(share + (stage >= num_stages - rest) for stage in range(num_stages))


def balance_by_work(work: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers per stage such that the stage with the most work has as little as can be; `work` has an entry per layer, 0 or more.

    A step takes (m - 1) times the slowest stage and once all of them, so to even out the others gains nothing: where equal numbers are as
    good they are taken, and where there is a choice a stage is near the mean of those that follow, for the sake of memory.

    Raises:
        ValueError: fewer layers than stages.
    """
    even = balance_evenly(len(work), num_stages)
    sums = list(itertools.accumulate(work, initial=0.0))
    most = _least_maximum(work, sums, num_stages)
    if _heaviest(sums, even) <= most:
        return even
    needed = _stages_needed(sums, most)
    counts, start, num_layers = [], 0, len(work)
    for left in range(num_stages, 1, -1):
        mean = (sums[-1] - sums[start]) / left
        room = bisect.bisect_right(sums, sums[start] + most) - 1
        ends = range(start + 1, min(room, num_layers - left + 1) + 1)
        end = min((end for end in ends if needed[end] < left), key=lambda end: abs(sums[end] - sums[start] - mean))
        counts.append(end - start)
        start = end
    return (*counts, num_layers - start)


def cut_by_work(work: Sequence[float], balance: Sequence[int]) -> CutStage:
    """Cuts a stage of `balance` layers into parts of about equal work; `work` has an entry per layer of the model, such as bytes."""
    starts = list(itertools.accumulate(balance, initial=0))

    def cut(stage: int, num_parts: int) -> Sequence[int]:
        return balance_by_work(work[starts[stage] : starts[stage + 1]], num_parts)

    return cut


def _least_maximum(work: Sequence[float], sums: Sequence[float], num_stages: int) -> float:
    """The least work that the heaviest of `num_stages` stages can have, and a billionth more: sums of floats are not exact."""
    low, high = max(work), sums[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _stages_needed(sums, middle)[0] <= num_stages:
            high = middle
        else:
            low = middle
    return high * _ROUNDING


def _stages_needed(sums: Sequence[float], most: float) -> list[int]:
    """Per layer: how many stages it and all that follow need, where no stage has more than `most`."""
    num_layers = len(sums) - 1
    needed = [0] * (num_layers + 1)
    for start in reversed(range(num_layers)):
        end = bisect.bisect_right(sums, sums[start] + most, lo=start + 1) - 1
        needed[start] = 1 + needed[max(end, start + 1)]
    return needed


def _heaviest(sums: Sequence[float], balance: Sequence[int]) -> float:
    """The work of the stage that has the most."""
    ends = itertools.accumulate(balance, initial=0)
    return max(sums[end] - sums[start] for start, end in itertools.pairwise(ends))
