"""What `CudaDevice` says of streams and memory, on a real allocator. Run by `make gpu-check`; needs one GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipetrain.comm.device import HIGH, CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: no GPU on this machine"),
]

NUM_BYTES = 1 << 21
SLOW_CYCLES = 100_000_000  # about 50 ms


def comes_back_at_once(lend: bool) -> bool:
    """Whether memory that a library has put under `record_stream`, for a stream that is busy, is given to the next who asks."""
    device, busy = CudaDevice(torch.device("cuda", 0)), torch.cuda.Stream()
    tensor = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    given: Tensor = device.lent(tensor) if lend else tensor
    with torch.cuda.stream(busy):
        torch.cuda._sleep(SLOW_CYCLES)
    given.record_stream(busy)
    del given, tensor
    return torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda").data_ptr() == address


def test_what_is_lent_is_not_kept_by_the_allocator() -> None:
    torch.cuda.empty_cache()
    assert not comes_back_at_once(lend=False), "this is what NCCL would do"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert comes_back_at_once(lend=True)


def test_streams_are_not_handed_out_twice() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    held = [device.stream(priority=HIGH) for _ in range(32)]
    assert len({stream.cuda_stream for stream in held}) == 32
    with pytest.raises(RuntimeError, match="fewer stages per rank"):
        device.stream(priority=HIGH)
    del held[7]
    assert device.stream(priority=HIGH).priority == held[0].priority
