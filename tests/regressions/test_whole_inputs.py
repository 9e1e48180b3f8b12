"""Each microbatch gets what is wrapped in Whole uncut and on its device; a layer or loss that changes it, or its target, in place is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_the_loop import batch, mean_square, refused
from over_a_cut import MODES, THREE_OVER_A_CUT, Then, only
from parity_cases import rows
from torch import Tensor, nn

from pipetrain.runtime.cut import Whole, slices
from pipetrain.runtime.reference import reference_step
from pipetrain.stage.errors import SavedTensorChanged


class AddPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0]) + value[1]


def test_reference_takes_whole_inputs() -> None:
    """Symptom: `reference_step` refused inputs in which a tensor was wrapped in Whole: "1 rows, the tensors before 2".

    Cause: it counted the rows of each microbatch, where Whole has been unwrapped, and not those of the batch.
    """
    inputs, targets = batch()
    model = nn.Sequential(AddPositions())
    loss = reference_step(model, mean_square, (inputs, Whole(torch.ones(1, 4))), targets, num_microbatches=3)
    expected = mean_square(model((inputs, torch.ones(1, 4))), targets)
    assert torch.allclose(loss, expected)


def test_whole_goes_to_the_device() -> None:
    """Symptom: on a GPU, "Expected all tensors to be on the same device" for what was wrapped in Whole.

    Cause: tensors of the batch were moved leaf by leaf, and Whole is a leaf that is no tensor.
    """
    batch = {"x": torch.ones(2, 1), "whole": Whole({"mask": (torch.ones(3), 5)})}
    (moved,) = slices(batch, 1, lambda tensor: tensor.to("meta"))
    mask, number = moved["whole"]["mask"]
    assert moved["x"].is_meta
    assert mask.is_meta
    assert number == 5


def change(x: Tensor) -> Tensor:
    return x.add_(1.0)


def change_data(x: Tensor) -> Tensor:
    x.data.add_(1.0)
    return x


@pytest.mark.parametrize("change", [change, change_data])
@pytest.mark.parametrize("place", ["first stage", "second stage", "targets"])
@pytest.mark.parametrize("mode", MODES, ids=["never", "always"])
def test_whole_changed_in_place(mode: Any, place: str, change: Callable[[Tensor], Tensor]) -> None:
    """Symptom: gradients off by up to 100 % where a layer changed in place what was wrapped in Whole.

    Cause: the plain loop adds up such changes from microbatch to microbatch; a copy per microbatch, or B after all F, does not.
    """
    x, y = rows(8)[0]
    first, second, loss_fn, name = (
        Then(only, lambda x: x[0] + x[1][1]),
        nn.Linear(8, 8),
        mean_square,
        r"inputs\[1\]\[1\]",
    )
    if place == "first stage":
        first = Then(only, lambda x: x[0] + change(x[1][1]))
    elif place == "second stage":
        first = Then(lambda x, y: (y, x[1][1]), lambda x: x[0])
        second = Then(only, lambda x: x[0] + change(x[1]))
    else:
        name, loss_fn = (
            r"targets\['w'\]",
            lambda output, target: ((output - target["y"] + change(target["w"])) ** 2).mean(),
        )
    targets = {"y": y, "w": Whole(torch.ones(8))} if place == "targets" else y
    message, given = f"stage .* changes in place: {name}, which is Whole", ((x, Whole((1, torch.ones(8)))), targets)
    refused(SavedTensorChanged, message, [first, second], loss_fn, given, recompute=mode, **THREE_OVER_A_CUT)


def test_targets_changed_in_place_where_the_loss_is_recomputed() -> None:
    """Symptom: `loss_fn` changed its target in place, and under `last_stage=always` R computed another loss than F.

    Cause: R gives it the same tensor a second time.
    """

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ((output * target.mul_(2.0)) ** 2).mean()

    message = r"stage 0, .* changes in place: leaf 0 of its target"
    refused(SavedTensorChanged, message, [nn.Linear(8, 8)], loss_fn, rows(8)[0])
