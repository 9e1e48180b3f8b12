"""Batches of samples, cut from one long row of tokens.

A window is `sequence_length` tokens and the one after: the inputs are the window without its last token, the targets the window
without its first. Windows lie side by side and share that one token, so each token but the first is predicted once:

    tokens   a b c d e f g h i j
    window 0 a b c d e           inputs a b c d  targets b c d e
    window 1         e f g h i   inputs e f g h  targets f g h i     (j is left over)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pipetrain.data.batch import Batch


def windows_of(tokens: Tensor, sequence_length: int) -> Tensor:
    """All windows `[windows, sequence_length + 1]`, a view of `tokens [tokens]`."""
    if len(tokens) <= sequence_length:
        return tokens.new_empty(0, sequence_length + 1)
    return tokens.unfold(0, sequence_length + 1, sequence_length)


class Batches:
    """Seeded, shuffled training batches. `batch(step)` depends on the arguments alone: to resume is to go on counting.

    The samples of an epoch are all windows, each once, in an order of its own; a batch may reach over the end of an epoch.
    """

    def __init__(self, tokens: Tensor, batch_size: int, sequence_length: int, seed: int) -> None:
        self._windows = windows_of(tokens, sequence_length)
        if len(self._windows) == 0:
            raise ValueError(
                f"{len(tokens)} tokens are fewer than one sample of sequence_length={sequence_length} and one more"
            )
        self.batch_size = batch_size
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(
            self._shuffled
        )  # two: a batch may need the end of one epoch and the next

    @property
    def windows_per_epoch(self) -> int:
        return len(self._windows)

    @property
    def samples_per_epoch(self) -> int:
        """Rows that make one time through the data."""
        return len(self._windows)

    def batch(self, step: int) -> Batch:
        """Inputs and targets `[batch_size, sequence_length]`, int64, of step 0, 1, ..."""
        return _inputs_and_targets(self._windows[self.window_indices(step)])

    def window_indices(self, step: int) -> Tensor:
        """Which windows make the batch of `step`, `[batch_size]`, int64."""
        first = step * self.batch_size
        parts, missing = [], self.batch_size
        while missing:
            epoch, position = divmod(first + self.batch_size - missing, len(self._windows))
            parts.append(self._order(epoch)[position : position + missing])
            missing -= len(parts[-1])
        return torch.cat(parts)

    def _shuffled(self, epoch: int) -> Tensor:
        # A hash of both: with seed + epoch, the second epoch of seed 0 would be the first of seed 1.
        digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return torch.randperm(len(self._windows), generator=generator)


class HeldoutBatches:
    """Held-out samples in order, each token predicted at most once; the last batch may be smaller.

    At most `max_tokens` are predicted. Where there are more, the samples are spread evenly over all of them, because the first bytes
    may be one long file that is like no other.
    """

    def __init__(self, tokens: Tensor, batch_size: int, sequence_length: int, max_tokens: int) -> None:
        self._windows = windows_of(tokens, sequence_length)
        self._batch_size = batch_size
        self._sequence_length = sequence_length
        self._count = min(len(self._windows), max_tokens // sequence_length)

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted, over all batches."""
        return self._count * self._sequence_length

    def __len__(self) -> int:
        return -(-self._count // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for indices in torch.split(self.window_indices(), self._batch_size):
            if len(indices):
                yield _inputs_and_targets(self._windows[indices])

    def window_indices(self) -> Tensor:
        """Which windows are read, ascending, `[count]`."""
        return torch.arange(self._count) * len(self._windows) // max(self._count, 1)


def _inputs_and_targets(windows: Tensor) -> Batch:
    wide = windows.to(torch.int64)
    return Batch(inputs=wide[:, :-1].contiguous(), targets=wide[:, 1:].contiguous())
