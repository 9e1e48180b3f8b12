"""Real threads, real order: ranks whose hosts wait for their devices everywhere, over NCCL's ends and receives that wait.

On this device layers compute on the host, after all that their stream was given: so the host waits for the device before every
op, and what a rank posts too early, or sends too late, hangs. What `make gpu-check` runs on a GPU runs here.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from late_device import LateDevice, LateFlag
from one_gpu import Shared
from ranks import PATIENCE_SECONDS
from spinning import SpinningRanks
from spun import compare_spinning

CASES = [
    (2, Shared("gaps", "gpipe", "overlap")),
    (3, Shared("pairs", "1f1b", "overlap")),
    (2, Shared("normed", "interleaved", "overlap", 2)),
]


@pytest.mark.parametrize(("num_ranks", "case"), CASES, ids=str)
def test_nothing_hangs(num_ranks: int, case: Shared) -> None:
    devices = [LateDevice() for _ in range(num_ranks)]
    stuck: list[int] = []
    ranks = SpinningRanks(
        num_ranks,
        torch.device("cpu"),
        devices.__getitem__,
        lambda: LateFlag(lambda: ranks.device, stuck, PATIENCE_SECONDS / 16),  # type: ignore[arg-type, return-value]
        nullcontext,
    )
    compare_spinning(ranks, num_ranks, "cpu", case)
    assert stuck == []
