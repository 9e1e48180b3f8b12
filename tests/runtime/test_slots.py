"""Late-bound sets by themselves: slots are filled in order, read at will, and gone with their node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.stage.errors import RecomputeMismatch
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
    assert (len(late.slots), meter.current_bytes) == (
        3 - 1,
        0,
    )  # x, for the weight's gradient, and the sigmoid's output
    recompute(late, weight, x)
    assert meter.current_bytes == 40
    loss.backward()
    assert meter.current_bytes == 0
    expected = torch.autograd.grad((x * weight).sigmoid().sum(), weight)[0]
    assert torch.equal(weight.grad, expected)


def test_a_kept_set_needs_no_recompute() -> None:
    _, meter, weight, x, loss = made(keep=True)
    assert meter.current_bytes == 40
    loss.backward()
    assert meter.current_bytes == 0
    assert torch.equal(weight.grad, torch.autograd.grad((x * weight).sigmoid().sum(), weight)[0])


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


def test_the_graph_of_recompute_is_not_used() -> None:
    late, _, weight, x, loss = made(keep=False)
    recompute(late, weight, x)
    loss.backward()
    first = weight.grad.clone()
    assert torch.equal(first, weight.grad)
    assert weight.grad_fn is None


def test_another_shape_is_refused() -> None:
    late, meter, weight, _, _ = made(keep=False)
    with pytest.raises(
        RecomputeMismatch, match=r"layer 0: the recompute saves a tensor \[2, 5\] float32, in F it was a tensor \[5\]"
    ):
        forward_again(Recompute(late), weight, torch.randn(2, 5))
    assert meter.current_bytes == 0


def test_two_layers_are_told_apart() -> None:
    meter = ActivationMeter()
    late = LateBoundSet(lambda number: f"layer {number}", meter, keep=False)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3, bias=False)]
    value = torch.randn(2, 3)
    for layer in layers:
        with late.start_layer():
            value = layer(value).tanh()
    late.end_forward()
    again = Recompute(late)
    hooks = again.start_layer()
    assert hooks is not None
    with hooks:
        value = layers[0](torch.randn(2, 3))
    with pytest.raises(RecomputeMismatch, match="layer 0: the recompute ended without saving"):
        again.start_layer()
