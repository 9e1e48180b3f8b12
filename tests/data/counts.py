"""How much of held-out batches counts."""

from __future__ import annotations

from collections.abc import Iterable

from pipetrain.data.batch import Batch
from pipetrain.data.samples import IGNORED


def num_counted(batches: Iterable[Batch]) -> int:
    """Tokens that are predicted and count, over all batches."""
    return sum(int((batch.targets != IGNORED).sum()) for batch in batches)
