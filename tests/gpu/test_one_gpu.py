"""Real steps of several ranks on one GPU, over edges of host memory, and of several stages on one rank: next to one process.

Streams, the allocator and numbers are real here. The order of NCCL's ops is not, nor a host that runs ahead of messages: a rank
waits for each to arrive. The same cases run on the CPU in tests/comm/test_pinned.py.
"""

from __future__ import annotations

import pytest
import torch
from one_gpu import Shared, compare_all, every_case, of_one_rank
from ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: no GPU on this machine"),
]
GPU = "cuda:0"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_on_one_gpu(num_ranks: int) -> None:
    cases = every_case()
    assert run_ranks(num_ranks, compare_all, GPU, num_ranks, cases) == [len(cases)] * num_ranks


def test_sanitized_ranks_on_one_gpu() -> None:
    """A few, for TORCH_CUDA_SANITIZER=1, under which an op takes many times as long."""
    cases = [Shared("pairs", "gpipe", "overlap"), Shared("gaps", "1f1b", "overlap"), Shared("normed", "gpipe", "early")]
    assert run_ranks(2, compare_all, GPU, 2, cases) == [len(cases)] * 2


@pytest.mark.parametrize("case", of_one_rank(), ids=str)
def test_sanitized_stages_of_one_rank(case: Shared) -> None:
    compare_all(GPU, 1, [case])
