"""The batches of a run whose phases have batches of their own: still a function of the step.

    steps     1  2  3  4 │ 5    6   │ 7     8          phases with batches of 2, of 3, and of 2 longer samples
    samples   ab cd ef gh│ ijk  lmn │ AB    CD         no sample comes again before all of its length have come

Samples of one length are one row over all phases that have it; those of another length are cut anew from the same text, and have a row of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.data.batch import Batch
from pipetrain.data.batches import Batches
from pipetrain.data.share import Share

PassedOver = Sequence[tuple[int, int]]
"""(a, b): the batches of steps a + 1 to b were passed over, because the run went back from step b to step a."""


class PhasedBatches:
    """The training batches of all phases: `(steps done before the phase, its batches)`, in their order. One is a run without phases."""

    def __init__(self, phases: Sequence[tuple[int, Batches]]) -> None:
        assert phases[0][0] == 0
        self._phases = phases

    def batch(self, step: int, passed_over: PassedOver = (), share: Share | None = None) -> Batch:
        """The batch of `step`, from 1, or the `share` of a replica."""
        own = next(batches for done, batches in reversed(self._phases) if done < step)
        first = self._samples_until(step - 1, own)
        first += sum(self._samples_until(end, own) - self._samples_until(start, own) for start, end in passed_over)
        return own.batch_from(first, share)

    def _samples_until(self, step: int, like: Batches) -> int:
        """Samples of those that `like` takes, in the steps up to `step`."""
        ends = [*(done for done, _ in self._phases[1:]), step]
        return sum(
            max(0, min(end, step) - done) * batches.batch_size
            for (done, batches), end in zip(self._phases, ends)
            if batches.are_of(like)
        )
