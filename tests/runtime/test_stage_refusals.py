"""A stage refuses a saved tensor, parameter or input that was changed, and a recomputation on another path than its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import make_stages, run_step
from parity_cases import mean_square
from stage_models import M, batch, count_call, linear, one_stage
from torch import Tensor, nn

from pipetrain.stage.errors import RecomputeMismatch, SavedTensorChanged
from pipetrain.stage.meter import ActivationMeter

# Refused: what was changed --------------------------------------------------------------------------------------------


class ChangesSaved(nn.Module):
    """Saves y for backward, then changes it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y * y
        y.add_(1)
        return z + y


class ChangesLater(nn.Module):
    """Its output is saved by itself and changed by the next layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (lambda: [linear(), ChangesSaved(), linear()], r"layer 1 \(ChangesSaved\): a tensor \[3, 8\]"),
        (lambda: [linear(), ChangesLater(), AddsInPlace()], r"layer 1 \(ChangesLater\): a tensor \[3, 8\]"),
    ],
)
def test_change_of_a_saved_tensor_in_forward(layers: Any, named: str, keep: bool) -> None:
    with pytest.raises(SavedTensorChanged, match=rf"{named} .* changed in place later in the same forward"):
        run_step(one_stage(*layers()), *batch(12), M, keep=lambda microbatch: keep)


def remembers(held: list[Tensor]) -> nn.Module:
    """A layer that puts what it saves into a list that is not its own."""

    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            held.append(y)
            return y * y

    return Remembers()


@pytest.mark.parametrize("changed", [0, 2])
def test_change_of_a_saved_tensor_between_forward_and_backward(changed: int) -> None:
    """A kept set: what was saved is the user's own tensor, changed before B. The first sets are in slots, the others in autograd's hands."""
    held: list[Tensor] = []
    stages = one_stage(linear(), remembers(held), linear())

    def change(microbatch: int) -> bool:
        if len(held) == M:
            held[changed].detach().add_(1)
        return True

    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Remembers\).*before B read it"):
        run_step(stages, *batch(), M, keep=change)


def test_change_of_a_recomputed_tensor_before_backward() -> None:
    held: list[Tensor] = []
    (stage,) = one_stage(linear(), remembers(held), linear())
    recompute = stage.recompute

    def recompute_and_change(microbatch: int) -> None:
        recompute(microbatch)
        held[-1].detach().add_(1)

    stage.recompute = recompute_and_change
    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Remembers\).*before B read it"):
        run_step([stage], *batch(), M)


def test_change_of_a_parameter_between_forward_and_recompute() -> None:
    first, second = linear(), linear()
    stages = one_stage(first, second)

    def change(stage: int, microbatch: int) -> None:
        if microbatch == 1:
            second.bias.data.copy_(second.bias)  # not seen: .data has a version of its own
            with torch.no_grad():
                second.weight.add_(1)

    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Linear\)\.weight changed between F and R"):
        run_step(stages, *batch(), M, before_recompute=change)


def test_change_of_a_parameter_between_forward_and_backward_of_a_kept_set() -> None:
    first, second = linear(), linear()
    stages = one_stage(first, second)
    calls: list[int] = []

    def keep(microbatch: int) -> bool:
        calls.append(microbatch)
        if len(calls) == M + 1:
            with torch.no_grad():
                second.weight.add_(1)
        return True

    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Linear\)"):
        run_step(stages, *batch(), M, keep=keep)


class ChangesInputSecondTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mul_(2) if self.calls > 1 else x * 2


def test_input_changed_in_place_from_the_second_microbatch_on() -> None:
    with pytest.raises(SavedTensorChanged, match=r"layer 0 \(ChangesInputSecondTime\) changes the input of stage 0"):
        run_step(one_stage(ChangesInputSecondTime(), linear()), *batch(), M)


# Refused: another path ------------------------------------------------------------------------------------------------


class OtherPath(nn.Module):
    """Runs `paths[0]` in F and `paths[1]` in R."""

    def __init__(self, *paths: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.paths = paths

    def forward(self, x: Tensor) -> Tensor:
        return self.paths[count_call(self) > M](x)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            (torch.sigmoid, torch.tanh),
            r"saves a tensor \[3, 8\] float32 made by TanhBackward, in F it was .* made by SigmoidBackward",
        ),
        ((lambda x: x * x, lambda x: x[:, :4] * x[:, 4:]), r"saves a tensor \[3, 4\] .*in F it was a tensor \[3, 8\]"),
        ((lambda x: x.exp(), lambda x: x.double().exp()), r"saves a tensor \[3, 8\] float64 .*in F it was .* float32"),
        ((lambda x: x * 2, lambda x: x.exp() * 2), r"saves a tensor \[3, 8\] float32 made by ExpBackward"),
        ((lambda x: x * 2, lambda x: (x * 2) * torch.ones(3, 8)), r"saves a tensor \[3, 8\] float32, in F it was"),
        (
            (lambda x: x.exp().sin(), lambda x: x.exp()),
            r"ended without saving a tensor \[3, 8\] float32 made by ExpBackward",
        ),
        ((lambda x: x.exp(), lambda x: x * 2), r"ended without saving a tensor \[3, 8\] float32 made by ExpBackward"),
    ],
    ids=["op", "shape", "dtype", "more", "one more without a gradient", "fewer", "none"],
)
def test_recompute_on_another_path(paths: Any, message: str) -> None:
    with pytest.raises(RecomputeMismatch, match=rf"layer 1 \(OtherPath\): the recompute {message}"):
        run_step(one_stage(linear(), OtherPath(*paths), linear()), *batch(12), M)


def test_recompute_that_ends_too_early() -> None:
    layers = [linear(), OtherPath(lambda x: x.exp(), lambda x: x.detach())]
    stages = make_stages([*layers, linear()], [2, 1], mean_square, ActivationMeter())
    with pytest.raises(RecomputeMismatch, match=r"layer 1 \(OtherPath\).*ended without saving a tensor \[3, 8\]"):
        run_step(stages, *batch(12), M)
