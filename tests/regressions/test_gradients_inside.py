"""A layer that takes a gradient inside its forward trains as in the plain loop, or the error names it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from beside_the_loop import ALWAYS, EVERY_MODE, NEVER, UNPROVED, check, refused
from torch import Tensor, nn

from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.errors import LayerRefused


class Energy(nn.Module):
    """Gives the place and its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = x.detach().requires_grad_()
        return place, torch.tanh(self.linear(place)).square().sum()


class Force(nn.Module):
    """Takes the gradient of what the layer before has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        place, energy = given
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return force * self.scale


class Penalty(nn.Module):
    """The slope of its own output beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(place).tanh().sum(), place, create_graph=True)
        return self.linear(x) + slope


class FunctionalPenalty(nn.Module):
    """The same by torch.func, which refuses saved-tensor hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: self.linear(y).tanh().sum())(x.detach())
        return self.linear(x) + slope


@pytest.mark.parametrize("recompute", [NEVER, ALWAYS], ids=["never", "always"])
@pytest.mark.parametrize("between", [0, 1])
def test_gradient_through_an_earlier_layer(recompute: RecomputePolicy, between: int) -> None:
    """Symptom: F of a stage with a layer for the energy and one for the force began again for ever, in every mode.

    Cause: the layer that took the gradient was run without hooks the next time; the layer that it read was not.
    """

    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), Energy(), *(nn.Identity() for _ in range(between)), Force(), nn.Linear(4, 4)]

    check(layers, recompute=recompute, stages=1)


def test_gradient_through_an_earlier_layer_that_is_met_too_late() -> None:
    """The same with nothing kept: the layer before cannot be run again, and both are named."""
    message = r"layer 1 \(Force\) takes a gradient through layer 0 \(Energy\) .*recompute.verify=first"
    refused(LayerRefused, message, [Energy(), Force()], num_stages=1, recompute=UNPROVED)


@EVERY_MODE
@pytest.mark.parametrize("penalty", [Penalty, FunctionalPenalty])
def test_gradient_inside_a_layer_runs_no_other_layer_again(
    recompute: RecomputePolicy, penalty: type[nn.Module]
) -> None:
    """Symptom: BatchNorm before such a layer was updated 5 times for 4, and an in-place first op applied twice.

    Cause: the whole stage began again, on buffers that a kept set had not copied and on an input that had been changed.
    """
    check(
        lambda: [nn.ReLU(inplace=True), nn.BatchNorm1d(4), penalty(), nn.BatchNorm1d(4)], recompute=recompute, stages=1
    )


@EVERY_MODE
def test_gradient_inside_a_layer_with_state(recompute: RecomputePolicy) -> None:
    """The layer that runs again finds its buffers, its counters and its random numbers as they were."""

    class Counts(FunctionalPenalty):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(self.norm(nn.functional.dropout(x, 0.5))) * self.calls

    check(lambda: [nn.Linear(4, 4), Counts(), nn.Linear(4, 4)], recompute=recompute, stages=1)


class FromTheThirdOn(Penalty):
    """Takes a gradient from its third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 2 else self.linear(x)


@EVERY_MODE
def test_gradient_inside_a_layer_from_a_later_microbatch_on(recompute: RecomputePolicy) -> None:
    """Symptom: F began again in the middle of a step. Cause: as above; what it had to undo was not what had been copied."""
    refused = pytest.raises(
        LayerRefused, match=r"layer 1 \(FromTheThirdOn\) takes a gradient inside its forward, which"
    )
    with refused if recompute == UNPROVED and recompute.verify == UNPROVED.verify else nullcontext():
        check(
            lambda: [nn.BatchNorm1d(4), FromTheThirdOn(), nn.Linear(4, 4)],
            recompute=recompute,
            stages=1,
            schedule="1f1b",
        )


class Swallows(nn.Module):
    """Does without the gradient where it is not given one."""

    def __init__(self, what: type[BaseException], *, functional: bool) -> None:
        super().__init__()
        self.what = what
        self.inner = FunctionalPenalty() if functional else Penalty()

    def forward(self, x: Tensor) -> Tensor:
        try:
            output: Tensor = self.inner(x)
        except self.what:
            output = x * 0
        return output


@EVERY_MODE
@pytest.mark.parametrize("what", [Exception, BaseException])
def test_layer_that_catches_what_asks_for_a_gradient(recompute: RecomputePolicy, what: type[BaseException]) -> None:
    """Symptom: a layer with `except Exception:` around its gradient took its fallback, in every mode.

    Cause: what got the stage out of the layer was an Exception, and whether the layer had let it pass was not asked.
    """
    check(lambda: [nn.Linear(4, 4), Swallows(what, functional=False), nn.Linear(4, 4)], recompute=recompute)


@EVERY_MODE
def test_layer_that_catches_what_torch_func_says_of_hooks(recompute: RecomputePolicy) -> None:
    """Symptom: the fallback again. Cause: torch.func refuses saved-tensor hooks by a RuntimeError, which the layer caught."""
    check(lambda: [nn.Linear(4, 4), Swallows(Exception, functional=True), nn.Linear(4, 4)], recompute=recompute)


@EVERY_MODE
def test_functions_that_ask_twice(recompute: RecomputePolicy) -> None:
    """A layer that reads the same saved tensors in several gradients, and in a second order."""

    class Hessian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            place = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(place).tanh().sum(), place, create_graph=True)
            (bend,) = torch.autograd.grad(slope.square().sum(), place, create_graph=True)
            return self.linear(x) + slope + bend

    check(lambda: [nn.Linear(4, 4), Hessian(), nn.BatchNorm1d(4), nn.Linear(4, 4)], recompute=recompute, stages=1)


class LocalLoss(nn.Module):
    """Trains its own weights by a loss of its own."""

    def __init__(self, *, catches: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.catches = catches

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.linear(x.detach()).square().mean().backward()
        except BaseException:
            if not self.catches:
                raise
        return self.linear(x)


@EVERY_MODE
@pytest.mark.parametrize("catches", [False, True])
def test_backward_inside_a_forward(recompute: RecomputePolicy, catches: bool) -> None:
    """Symptom: gradients off by up to 100 %, without a word.

    Cause: it adds to `.grad` in F, and in R again; in a pipeline F of one microbatch stands before B of another.
    """
    layers = [nn.Linear(4, 4), LocalLoss(catches=catches), nn.Linear(4, 4)]
    refused(LayerRefused, r"layer 1 \(LocalLoss\) calls backward\(\) in its forward", layers, recompute=recompute)
