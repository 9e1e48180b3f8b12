"""Values between the host and a device that is behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from late_device import LateDevice
from torch import Tensor

from pipetrain.comm.device import CpuDevice, Device, bring, fetch
from pipetrain.comm.failure import FailureBoard, Monitor

META = torch.device("meta")


class Copies(LateDevice):
    """Says what was copied; what it gives as memory of the host is known to it."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[int] = []
        self.copied: list[tuple[Tensor, Tensor]] = []

    def host_memory(self, num_bytes: int) -> Tensor:
        memory = super().host_memory(num_bytes)
        self.own.append(memory.data_ptr())
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copied.append((target, source))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12).view(3, 4),
        lambda: torch.randn(5, dtype=torch.bfloat16),
        lambda: torch.tensor(2.5),
        lambda: torch.randn(2, 3, requires_grad=True),
    ],
    ids=["integers", "half", "a number", "learning"],
)
def test_what_is_brought_can_be_overwritten_at_once(make: Callable[[], Tensor]) -> None:
    device, given = Copies(), make()
    wanted = given.detach().clone()
    there = bring(given, META, device)
    given.data.zero_()
    ((target, source),) = device.copied
    assert target is there
    assert there.device == META
    assert source.data_ptr() in device.own, "a copy from memory that the driver does not know makes the host wait"
    assert torch.equal(source, wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(3, 4).to_sparse(),
        lambda: torch.empty(0, 3),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=["strides", "sparse", "empty", "conjugate"],
)
def test_what_only_torch_can_copy(make: Callable[[], Tensor]) -> None:
    device, given = Copies(), make()
    there = bring(given, META, device)
    assert (there.shape, there.dtype, there.layout, there.device) == (given.shape, given.dtype, given.layout, META)
    assert device.copied == []
    if given.layout is torch.strided:
        assert there.stride() == given.stride()


@pytest.mark.parametrize("device", [CpuDevice(), Copies()], ids=["cpu", "ahead"])
def test_what_is_there_is_not_copied(device: Device) -> None:
    given = torch.ones(3)
    assert bring(given, torch.device("cpu"), device) is given


def test_a_value_is_fetched_when_all_before_it_has_run() -> None:
    device, monitor = LateDevice(), Monitor(0, FailureBoard(None), timeout_seconds=600.0)
    value = torch.zeros(4, dtype=torch.float64)
    device.copy(value, torch.arange(4, dtype=torch.float64))  # ends late
    assert fetch(value, "numbers", device, monitor).tolist() == [0, 1, 2, 3]
