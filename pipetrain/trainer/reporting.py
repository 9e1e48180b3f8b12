"""After which steps the ranks report what ran when: so often that it costs little.

Loss, learning rate and gradient norm are known on every rank and written after each step. Events go up the chain of ranks and are taken
apart and drawn by rank 0: after the first steps, then after every n-th. Rank 0 fixes n once, by what the first reports cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_STEPS = 10  # all of which report: this is where a run goes wrong or settles
MOST_SHARE = 0.01  # of the time of steps


class Reports:
    """One per rank; `agree` gives the largest number that any rank gave. `is_first`: whether it is rank 0, whose clock counts."""

    def __init__(self, agree: Callable[[int], int], *, is_first: bool) -> None:
        self.every: int | None = None  # None: not fixed yet
        self._agree = agree
        self._is_first = is_first
        self._cost = 0.0  # of this step
        self._costs: list[float] = []
        self._steps: list[float] = []

    def are_due(self, step: int) -> bool:
        """Whether the ranks report `step`; the same on every rank."""
        return self.every is None or step % self.every == 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what a report costs: the time that this thread computes, because it would wait for the other ranks anyway."""
        before = time.thread_time()
        yield
        self._cost += time.thread_time() - before

    def end_step(self, seconds: float) -> None:
        """A step took so long. Collective after the last of the first ones."""
        cost, self._cost = self._cost, 0.0
        if self.every is not None:
            return
        self._costs.append(cost)
        self._steps.append(seconds)
        if len(self._steps) == FIRST_STEPS:
            share = statistics.median(self._costs) / max(statistics.median(self._steps), 1e-9)
            self.every = self._agree(max(1, math.ceil(share / MOST_SHARE)) if self._is_first else 0)
