"""Order, and that nothing hangs, on a real device: ranks as threads of one GPU, over NCCL's ends and receives that spin on it.

A receive that spins holds its stream, and the device behind it, until its message is there. What is not NCCL's here: its
protocols, its blocks, and that each rank has a device of its own.
"""

from __future__ import annotations

import pytest
import torch
from one_gpu import Shared
from ranks import run_ranks
from spinning import SpinningRanks
from spun import compare_spinning

from pipetrain.comm.device import device_of
from pipetrain.schedule.policy import Mode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: no GPU on this machine"),
]

CASES = [
    *((3, Shared("pairs", schedule, mode.value)) for schedule in ("gpipe", "1f1b") for mode in Mode),
    *((2, Shared(model, "interleaved", "overlap", 2)) for model in ("gaps", "normed")),
]


def spun(waits: bool) -> list[str]:
    """The cases in which a wait was given up, as the ranks hung."""
    from gpu.flags import SpinningFlag, warm_up

    gpu = torch.device("cuda", 0)
    verbs = device_of(gpu)
    stuck = torch.zeros(1, dtype=torch.int32, device=gpu)
    warm_up(stuck)
    hung = []
    for num_ranks, case in CASES:
        ranks = SpinningRanks(
            num_ranks, gpu, lambda rank: verbs, lambda: SpinningFlag(stuck), lambda: verbs.on(verbs.stream())
        )
        compare_spinning(ranks, num_ranks, "cuda:0", case, waits=waits)
        if int(stuck):
            hung.append(f"{num_ranks} ranks, {case}")
            stuck.zero_()
    return hung


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_hangs_on_a_gpu(waits: bool) -> None:
    """In a process of its own: one that hangs is killed."""
    pytest.importorskip("triton")
    assert run_ranks(1, spun, waits) == [[]]
