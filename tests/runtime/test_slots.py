"""Late-bound sets by themselves: slots are filled by R, read by B, and gone with their node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.recompute import Recompute, SetComplete
from pipetrain.stage.slots import LateBoundSet


def forward(late: LateBoundSet, weight: Tensor, x: Tensor) -> Tensor:
    with late.start_layer():
        return (x * weight).sigmoid().sum()


def forward_again(again: Recompute, weight: Tensor, x: Tensor) -> Tensor:
    hooks = again.start_layer()
    assert hooks is not None
    with hooks:
        return (x * weight).sigmoid().sum()


def recompute(late: LateBoundSet, weight: Tensor, x: Tensor) -> None:
    again = Recompute(late)
    with pytest.raises(SetComplete):
        forward_again(again, weight, x)
    again.end()


def made(keep: bool) -> tuple[LateBoundSet, ActivationMeter, Tensor, Tensor, Tensor]:
    meter = ActivationMeter()
    late = LateBoundSet(lambda number: f"layer {number}", meter, keep=keep)
    weight, x = torch.randn(5, requires_grad=True), torch.randn(5)
    loss = forward(late, weight, x)
    late.end_forward()
    return late, meter, weight, x, loss


def test_a_late_bound_set_holds_nothing_until_it_is_recomputed() -> None:
    late, meter, weight, x, loss = made(keep=False)
    assert (len(late.slots), meter.current_bytes) == (2, 0)  # x, for the weight's gradient, and the sigmoid's output
    recompute(late, weight, x)
    assert meter.current_bytes == 40
    loss.backward()
    assert meter.current_bytes == 0
    expected = torch.autograd.grad((x * weight).sigmoid().sum(), weight)[0]
    assert torch.equal(weight.grad, expected)


def test_an_empty_slot_is_not_read() -> None:
    *_, loss = made(keep=False)
    with pytest.raises(AssertionError, match="B reads an empty slot of layer 0: its R has not run"):
        loss.backward()


@pytest.mark.parametrize("keep", [False, True])
def test_a_graph_that_is_dropped_releases_its_slots(keep: bool) -> None:
    late, meter, weight, x, loss = made(keep)
    if not keep:
        recompute(late, weight, x)
    assert meter.current_bytes == 40
    del loss, late
    assert meter.current_bytes == 0
