"""The samples of a step. A batch is a function of the step alone, so that to resume is to go on counting; also over phases:

    steps     1  2  3  4 │ 5    6   │ 7     8          phases with batches of 2, of 3, and of 2 longer samples
    samples   ab cd ef gh│ ijk  lmn │ AB    CD         no sample comes again before all of its length have come

Samples of one length are one row over all phases that have it; those of another length are cut anew from the same text, and have a row of
their own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipetrain.data.batch import Batch, Share
from pipetrain.data.samples import Samples
from pipetrain.data.tokenizer import Tokenizer


class Batches:
    """Seeded, shuffled training batches. `batch(step)` depends on the arguments alone.

    An epoch has all samples, each once, in an order of its own; a batch may reach over the end of an epoch.
    """

    def __init__(self, samples: Samples, batch_size: int, seed: int) -> None:
        assert len(samples), "there is a sample to train on"
        self._samples = samples
        self.batch_size = batch_size
        self._seed = seed
        # Two: a batch may need the end of one epoch and the next.
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def close(self) -> None:
        """Gives back what is held to read them: nothing."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples that make one time through the data."""
        return len(self._samples)

    def batch(self, step: int, share: Share | None = None) -> Batch:
        """The batch of step 0, 1, ..., of `batch_size` samples; or the `share` of a replica, and nothing else of it is read."""
        return self.batch_from(step * self.batch_size, share)

    def batch_from(self, first: int, share: Share | None = None) -> Batch:
        """`batch_size` samples, or a `share` of them, where `first` came before them."""
        return self._samples.take(self.indices_from(first, share))

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot must hold to go on: nothing, because a batch is a function of the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what `state_dict` gave."""

    def are_of(self, other: Batches) -> bool:
        """Whether both take the very same samples, in one order."""
        return self._samples is other._samples and self._seed == other._seed

    def indices_from(self, first: int, share: Share | None = None) -> NDArray[np.int64]:
        """Which samples make a batch where `first` came before, `[batch_size]`, or which of them a `share` has."""
        parts, missing = [], self.batch_size
        while missing:
            epoch, position = divmod(first + self.batch_size - missing, len(self._samples))
            parts.append(self._order(epoch)[position : position + missing])
            missing -= len(parts[-1])
        indices = np.concatenate(parts)
        return indices if share is None else indices[share.rows_of(len(indices))]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # A hash of both: with seed + epoch, the second epoch of seed 0 would be the first of seed 1.
        digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return torch.randperm(len(self._samples), generator=generator).numpy()


class HeldoutBatches:
    """Held-out samples in order, each token predicted at most once; the last batch may be smaller.

    At most `max_tokens` are read, and counted as a sample of `sequence_length` each. Where there are more, the samples are spread evenly over
    all of them, because the first may be of one long file that is like no other.
    """

    def __init__(self, samples: Samples, batch_size: int, max_tokens: int) -> None:
        self._samples, self._batch_size = samples, batch_size
        count = min(len(samples), max_tokens // samples.sequence_length)
        self.indices = np.arange(count, dtype=np.int64) * len(samples) // max(count, 1)  # of the samples that are read

    def __len__(self) -> int:
        return -(-len(self.indices) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.indices), self._batch_size):
            yield self._samples.take(self.indices[first : first + self._batch_size])


PassedOver = Sequence[tuple[int, int]]
"""(a, b): the run rolled back from step b to step a, and skips the batches that steps a + 1 to b had read."""


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


@dataclass(frozen=True)
class Data:
    """What a run reads. `fingerprint`: equal for the same samples, in whatever order; `tokenizer` is None where ids are all there is."""

    train: Batches
    heldout: HeldoutBatches  # empty where nothing is held out
    vocabulary_size: int
    tokenizer: Tokenizer | None
    fingerprint: str
    num_skipped: int = 0  # documents that are no samples, with data.on_error=skip
    first_skipped: str | None = None  # why the first of them is none
