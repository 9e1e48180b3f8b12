"""The museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import itertools
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import Case, check_case, rows, run_cases
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.config.load import load
from pipetrain.observe import folder
from pipetrain.observe.folder import choose_folder
from pipetrain.prepare import prepare
from pipetrain.runtime.cut import Whole, on_device
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.attributes import StateChanged
from pipetrain.stage.slots import LayerRefused, RecomputeMismatch, SavedTensorChanged

ALWAYS = RecomputePolicy(last_stage="always")


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


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


def step_with_a_frozen_first_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    inputs, targets = batch()
    options = {"schedule": "interleaved", "stages_per_rank": 2, "timeout_seconds": NEVER_SECONDS}
    with Pipeline(model, mean_square, num_microbatches=3, **options) as pipeline:
        for step, frozen in enumerate((False, True, False)):
            for layers in (model, reference):
                layers[1].requires_grad_(not frozen)
            loss = pipeline.step(inputs, targets)
            assert torch.equal(
                loss, reference_step(reference, mean_square, inputs, targets, num_microbatches=3, step=step)
            )


def test_frozen_first_stage_with_several_stages_per_rank() -> None:
    """Symptom: with two stages per rank and stage 0 frozen, rank 1 waited in 1RECV_B0 until the time-out.

    Cause: which stage is the first that needs a gradient was handed down the chain of ranks, so rank 0, which holds
    stage 2, never heard that stage 1 on rank 1 does, and sent it no gradients.
    """
    run_ranks(2, step_with_a_frozen_first_stage)


def bad_batch_after_unfreezing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    inputs, targets = batch()
    with Pipeline(model, mean_square, num_microbatches=3, timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(inputs, targets)
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match="num_microbatches=3"):
            pipeline.step(inputs[:2], targets[:2])
        pipeline.step(inputs, targets)
        assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_bad_batch_after_unfreezing() -> None:
    """Symptom: a layer was unfrozen, a batch was refused, and the next good step failed: it sent a gradient with no form.

    Cause: the refused call was taken for the one in which the ranks tell each other what needs a gradient now.
    """
    run_ranks(2, bad_batch_after_unfreezing)


def test_checkpoint_inside_a_layer_is_not_taken_for_a_leak() -> None:
    """Symptom: a layer with `torch.utils.checkpoint` inside warned that it "holds 5056 bytes outside of its saved tensors".

    Cause: those are the generator states that checkpoint keeps; the limit for what is worth a warning was 4096 bytes.
    """

    class Checkpointed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return output

    with Pipeline([Checkpointed(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(*batch())


def test_recompute_that_saves_less_names_its_own_layer() -> None:
    """Symptom: a layer saved a tensor less in R than in F, and the error named the layer after it.

    Cause: what the next layer saved was compared with what had not come; the count at the end of a layer was not.
    """

    calls: list[int] = []  # not in the layer: there R would put it back as it was

    class SavesOnce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x.exp() if len(calls) > 3 else x.exp().sin()

    layers = [nn.Linear(4, 4), SavesOnce(), nn.Linear(4, 4)]
    message = r"layer 1 \(SavesOnce\): the recompute ended without saving"
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=ALWAYS)
    with pytest.raises(RecomputeMismatch, match=message):
        pipeline.step(*batch())


def step_with_a_schedule_for_a_frozen_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3, first_backward=1)
    with Pipeline(model, mean_square, num_microbatches=3, schedule=schedule, timeout_seconds=NEVER_SECONDS) as pipeline:
        assert pipeline.schedule == schedule
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


def test_a_schedule_made_for_a_frozen_first_stage() -> None:
    """Symptom: a schedule made with first_backward=1 was refused, with the advice to make one with first_backward=0.

    Cause: the schedules were first checked as if every stage needed gradients.
    """
    run_ranks(2, step_with_a_schedule_for_a_frozen_stage)


# Layers that are no clean stack: each trains as the plain loop does, or is named. -------------------------------------

# Gradients inside a forward, and control flow of a layer's own.


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


NEVER = RecomputePolicy("never")
UNPROVED = RecomputePolicy(last_stage="always", verify="off")


def check(
    layers: Callable[[], list[nn.Module]],
    *,
    recompute: RecomputePolicy,
    stages: int = 2,
    steps: int = 2,
    **options: Any,
) -> None:
    """Equal to the plain loop, `stages` stages on one rank."""
    batches = [batch() for _ in range(steps)]
    options = {"num_microbatches": 3, "num_stages": stages, "stages_per_rank": stages, **options}
    loss = options.pop("loss", mean_square)
    case = Case("layers", layers, lambda: batches, loss, options={"recompute": recompute, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*inside its forward")
        check_case(case)


EVERY_MODE = pytest.mark.parametrize("recompute", [NEVER, ALWAYS, UNPROVED], ids=["never", "always", "unproved"])


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
    pipeline = Pipeline([Energy(), Force()], mean_square, num_microbatches=3, num_stages=1, recompute=UNPROVED)
    message = r"layer 1 \(Force\) takes a gradient through layer 0 \(Energy\) .*recompute.verify=first"
    with pytest.raises(LayerRefused, match=message):
        pipeline.step(*batch())


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


@EVERY_MODE
def test_gradient_inside_the_loss(recompute: RecomputePolicy) -> None:
    """Symptom: a loss with a gradient penalty updated the BatchNorm of its stage once too often.

    Cause: as above; the loss is the last layer of its stage.
    """

    def loss(output: Tensor, target: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
        return mean_square(output, target) + slope.square().mean()

    check(lambda: [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)], recompute=recompute, loss=loss)


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
    check(
        lambda: [nn.BatchNorm1d(4), FromTheThirdOn(), nn.Linear(4, 4)], recompute=recompute, stages=1, schedule="1f1b"
    )


class FillsLater(nn.Module):
    """Its operation draws its noise after it has saved the tensor for it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(x, 0.1, 0.9, training=True)


@EVERY_MODE
@pytest.mark.parametrize("place", ["last", "middle", "before a layer that saves nothing"])
def test_operation_that_fills_what_it_has_saved(recompute: RecomputePolicy, place: str) -> None:
    """Symptom: RReLU last in a recomputed stage gave gradients of 1e7 to 1e13.

    Cause: R ended when the last tensor was saved, and the operation had not filled it yet.
    """
    after: dict[str, list[nn.Module]] = {
        "last": [],
        "middle": [nn.Linear(4, 4)],
        "before a layer that saves nothing": [nn.Identity()],
    }
    check(
        lambda: [nn.Linear(4, 4), FillsLater(), *after[place], nn.Linear(4, 4)],
        recompute=recompute,
        balance=[2 + len(after[place]), 1],
    )


class ChangesThroughData(nn.Module):
    """Changes in place what the layer before has saved, so that no version tells."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x


def test_saved_tensor_that_a_later_layer_changes_without_a_word() -> None:
    """Symptom: gradients of another tensor than the plain loop's.

    Cause: R ended before the layer that changes what had been saved; what counts is the value at the end of F.
    """
    check(
        lambda: [nn.Linear(4, 4), nn.Sigmoid(), ChangesThroughData(), nn.Linear(4, 4)], recompute=ALWAYS, balance=[3, 1]
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


class SwallowsTheEnd(nn.Module):
    """Its last operation saves the last tensor of the stage."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.sigmoid(x)
        except BaseException:
            return torch.sigmoid(torch.tanh(x))


def test_layer_that_catches_the_end_of_recompute() -> None:
    """Symptom: RecomputeMismatch with a reason that was not true: "saves one tensor more than in F".

    Cause: the layer caught what ends R when the last tensor is saved, and went on.
    """
    check(lambda: [nn.Linear(4, 4), SwallowsTheEnd(), nn.Linear(4, 4)], recompute=ALWAYS, balance=[2, 1])


def test_mismatch_that_a_layer_catches() -> None:
    """Symptom: the wrong layer was named. Cause: the right error went through a layer that caught it."""

    class OtherOperation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return x.exp() if next(calls) < 3 else x.sin()
            except Exception:
                return x.exp()

    calls = itertools.count()
    pipeline = Pipeline(
        [nn.Linear(4, 4), OtherOperation(), nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS
    )
    with pytest.raises(
        RecomputeMismatch, match=r"layer 1 \(OtherOperation\): the recompute saves .* in F it was .*ExpBackward"
    ):
        pipeline.step(*batch())


def test_other_values_in_recompute() -> None:
    """Symptom: gradients of values that F has not seen, without a word.

    Cause: only shapes, types and operations of what R saves were compared with those of F.
    """
    own = itertools.count()

    class Drifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x + next(own))

    layers = [nn.Linear(4, 4), Drifts(), nn.Linear(4, 4)]
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=ALWAYS)
    message = r"layer 1 \(Drifts\): the recompute saves a tensor \[2, 4\] float32 made by SigmoidBackward with other values: \d of 8 entries differ, by up to .*a counter, a cache"
    with pytest.raises(RecomputeMismatch, match=message):
        pipeline.step(*batch())


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


# State that a forward changes.


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
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=recompute)
    with pytest.raises(LayerRefused, match=r"layer 1 \(LocalLoss\) calls backward\(\) in its forward"):
        pipeline.step(*batch())


# Recomputed on every stage, in two orders; on one stage and on two; and kept.
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"recompute": ALWAYS},
    "inline": {"recompute": RecomputePolicy("inline", last_stage="always")},
    "two stages": {"recompute": ALWAYS, "schedule": "interleaved", "stages_per_rank": 2, "balance": [1, 3]},
    "two places": {"recompute": RecomputePolicy("early", last_stage="always", sets=2, keep="none")},
    "never": {"recompute": RecomputePolicy("never", last_stage="always")},  # every F before the first B
}


def check_state(
    make_layers: Callable[[], Sequence[nn.Module]],
    ways: Iterable[str] = WAYS,
    *,
    make_loss: Callable[[], Any] = lambda: mean_square,
    before_step: Callable[[int, nn.Sequential], None] = lambda step, model: None,
    make_batch: Callable[[], tuple[Any, Tensor]] = batch,
) -> None:
    """Three steps beside the plain loop, each way: loss, gradients, and at the end buffers, are equal bit for bit.

    There is a linear layer before `make_layers()` and one behind.
    """
    for way in ways:
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(4, 4), *make_layers(), nn.Linear(4, 4))
        torch.manual_seed(0)
        theirs = nn.Sequential(nn.Linear(4, 4), *make_layers(), nn.Linear(4, 4))
        loss, reference_loss = make_loss(), make_loss()
        options = dict(WAYS[way])
        if "balance" in options:
            options["balance"] = [1, len(ours) - 1]
        with Pipeline(ours, loss, num_microbatches=3, **options) as pipeline:
            for step in range(3):
                before_step(step, ours)
                before_step(step, theirs)
                inputs, targets = make_batch()
                found = pipeline.step(inputs, targets)
                inputs, targets = make_batch()
                expected = reference_step(theirs, reference_loss, inputs, targets, num_microbatches=3, step=step)
                assert torch.equal(found, expected), f"{way}, step {step}: loss {found}, expected {expected}"
                assert_same_gradients(ours, theirs)
            for name, value in theirs.state_dict().items():
                assert torch.equal(ours.state_dict()[name].to_dense(), value.to_dense()), f"{way}: {name} differs"


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters()):
        assert (own.grad is None) == (other.grad is None), name
        assert own.grad is None or torch.equal(own.grad, other.grad), f"{name}.grad differs"


class Scales(nn.Module):
    """Multiplies by a buffer; `change` is called with the layer ahead of each use."""

    def __init__(self, change: Callable[[Any], None], size: int = 4) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))
        self.calls = 0
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return x * x * self.scale[:4]


def grow(layer: Any) -> None:
    layer.scale += 0.25


def grow_unseen(layer: Any) -> None:
    layer.scale.data.mul_(1.25)


def grow_every_third(layer: Any) -> None:
    layer.calls += 1
    if layer.calls % 3 == 0:
        layer.scale += 0.25


def put_another(layer: Any) -> None:
    layer.scale = layer.scale * 1.25


def grow_once_warm(layer: Any) -> None:
    if layer.training and WARM[0]:
        layer.scale.data.mul_(1.25)


WARM = [False]


@pytest.mark.parametrize("change", [grow, grow_unseen, grow_every_third, put_another])
def test_a_buffer_that_changes_in_its_own_way(change: Any) -> None:
    """Symptom: gradients 5 % off where a buffer changed in every third forward; wrong in every mode where `.data` did it.

    Cause: only buffers that the first forward changed were copied for R, and a kept set looked into the live buffer.
    """
    check_state(lambda: [Scales(change), nn.Linear(4, 4)])


def test_a_buffer_that_begins_to_change_in_the_second_step() -> None:
    """Symptom and cause: as above, for what the whole first step leaves alone."""

    def warm(step: int, model: nn.Sequential) -> None:
        WARM[0] = step > 0

    check_state(
        lambda: [Scales(grow_once_warm), nn.Linear(4, 4)], ["overlap", "inline", "two stages"], before_step=warm
    )


def test_a_buffer_that_begins_to_change_under_a_kept_set() -> None:
    """Symptom: gradients wrong in `never`, by 0.29 where a layer read BatchNorm's running variance; or refused.

    Cause: a kept set looked into the live buffer, unless a forward was known to change it and no BatchNorm owned it.
    """

    def warm(step: int, model: nn.Sequential) -> None:
        WARM[0] = step > 0

    class ReadsItsVariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.tanh(self.norm(x))) * self.norm.running_var

    check_state(lambda: [Scales(grow_once_warm), nn.Linear(4, 4)], ["never"], before_step=warm)
    check_state(lambda: [ReadsItsVariance(), nn.Linear(4, 4)], ["never", "overlap"])


def test_momentum_and_statistics_switched_on_later() -> None:
    """Symptom: BatchNorm with momentum 0, then 0.1: R moved the running statistics again. Cause: as above."""

    def switch(step: int, model: nn.Sequential) -> None:
        model[1].momentum = 0.1 * step
        model[2].train(step != 1)

    check_state(lambda: [nn.BatchNorm1d(4, momentum=0.0), nn.BatchNorm1d(4), nn.Tanh()], before_step=switch)


def test_a_large_buffer_that_begins_to_change_is_named() -> None:
    """Symptom: silent wrong gradients. Cause: as above; a large buffer is not copied unless it is known to change."""
    layers = [nn.Linear(4, 4), Scales(grow_late, 100_000), nn.Linear(4, 4)]
    with (
        Pipeline(layers, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline,
        pytest.raises(
            StateChanged, match=r"layer 1 \(Scales\).scale, a tensor of \[100000\], is changed by a forward f"
        ),
    ):
        pipeline.step(*batch())
    check_state(lambda: [Scales(grow, 100_000)])


def grow_late(layer: Any) -> None:
    layer.calls += 1
    if layer.calls == 2:
        layer.scale += 0.25


def test_a_buffer_that_the_first_forward_registers() -> None:
    """Symptom: R registered it again, or read the value of the last forward. Cause: buffers were listed before it."""

    class Registers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "count"):
                self.register_buffer("count", torch.zeros(()))
            self.count += 1
            return x * x * self.count

    check_state(lambda: [Registers(), nn.Linear(4, 4)])


def test_a_module_with_a_changing_buffer_used_twice() -> None:
    """Symptom: gradients 26 % off; with spectral_norm not bit-equal.

    Cause: R ran each layer on copies of its own, so the second use did not see what the first had changed.
    """

    def twice(layer: nn.Module) -> list[nn.Module]:
        return [layer, nn.Tanh(), layer]

    ways = ["overlap", "inline", "two places"]  # over two stages it is refused
    check_state(lambda: twice(Scales(grow_unseen)), ways)
    check_state(lambda: twice(nn.BatchNorm1d(4)), ways)
    check_state(lambda: twice(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), ways)


def test_a_layer_that_reads_the_buffer_of_another() -> None:
    """Symptom: gradients 26 % off. Cause: as above."""

    class Reads(nn.Module):
        def __init__(self, other: Scales, *, view: bool) -> None:
            super().__init__()
            self.of_other = other.scale[None] if view else other.scale

        def forward(self, x: Tensor) -> Tensor:
            return x * x * self.of_other

    def pair(*, view: bool) -> list[nn.Module]:
        scales = Scales(grow)
        return [scales, Reads(scales, view=view)]

    for view in (False, True):
        check_state(lambda view=view: pair(view=view), ["overlap", "inline", "two places"])


class Counts(nn.Module):
    """Multiplies by a number of its own, which `count` gives."""

    def __init__(self, count: Callable[[Any], Any]) -> None:
        super().__init__()
        self.count = count
        self.calls = 0
        self.table: dict[str, Any] = {"calls": 0, "each": []}
        self.last: Any = torch.zeros(())
        self.kind = {"numpy": np.random.default_rng(1), "old": np.random.RandomState(1), "python": random.Random(1)}
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * x * (1 + 0.1 * self.count(self))


def counter(layer: Any) -> int:
    layer.calls += 1
    return int(layer.calls)


def counter_in_a_dict(layer: Any) -> int:
    layer.table["calls"] += 1
    layer.table["each"].append(layer.table["calls"])
    return len(layer.table["each"])


def tensor_attribute(layer: Any) -> Tensor:
    layer.last = layer.last + 1
    return layer.last


def tensor_changed_in_place(layer: Any) -> Tensor:
    layer.last += 1
    return layer.last.clone()


def deque_of_tensors(layer: Any) -> Tensor:
    if "recent" not in layer.table:
        layer.table["recent"] = deque([torch.ones(())], maxlen=3)
    layer.table["recent"].append(layer.table["recent"][-1] + 1)
    return torch.stack(list(layer.table["recent"])).sum()


NUM_CALLS = 0


class CountsGlobally(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global NUM_CALLS
        NUM_CALLS += 1
        return x * x * (1 + 0.1 * (NUM_CALLS % 7))


def counts_in_a_function() -> nn.Module:
    calls = 0

    class CountsThere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x * x * (1 + 0.1 * calls)

    return CountsThere()


def test_a_counter_outside_of_the_layer() -> None:
    """Symptom and cause: as below, for a variable of the module or of the function in which the class is."""
    global NUM_CALLS
    check_state(lambda: [counts_in_a_function(), nn.Linear(4, 4)])
    ours = nn.Sequential(nn.Linear(4, 4), CountsGlobally(), nn.Linear(4, 4))
    theirs = copy.deepcopy(ours)
    NUM_CALLS = 0
    with Pipeline(ours, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        found = pipeline.step(*batch())
    assert NUM_CALLS == 3
    NUM_CALLS = 0
    assert torch.equal(found, reference_step(theirs, mean_square, *batch(), num_microbatches=3))
    assert_same_gradients(ours, theirs)


STATE = [
    counter,
    counter_in_a_dict,
    tensor_attribute,
    tensor_changed_in_place,
    deque_of_tensors,
    lambda layer: torch.rand((), generator=layer.generator),
    lambda layer: layer.kind["numpy"].random(),
    lambda layer: layer.kind["old"].rand(),
    lambda layer: layer.kind["python"].random(),
    lambda layer: random.random(),
    lambda layer: np.random.rand() + random.gauss(0, 1),
]


@pytest.mark.parametrize("count", STATE, ids=range(len(STATE)))
def test_state_in_plain_python(count: Any) -> None:
    """Symptom: wrong gradients without a word where a forward counts, caches, or draws from a generator of its own.

    Cause: R ran with what the forwards after its own had left, and left its own traces for the next forward.
    """
    check_state(lambda: [Counts(count), nn.Linear(4, 4)])


def test_a_loss_with_state() -> None:
    """Symptom: wrong gradients under last_stage=always. Cause: as above, for loss_fn."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            with torch.no_grad():
                self.mean.lerp_(output.mean(), 0.5)
            return mean_square(output * output, target) * (self.mean + self.calls)

        def method(self, output: Tensor, target: Tensor) -> Tensor:
            return self(output, target)

    def closure() -> Callable[[Tensor, Tensor], Tensor]:
        calls, sums = 0, [1.0]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            sums.append(sums[-1] * 1.1)
            return mean_square(output * output, target) * (calls + sums[-1])

        return loss

    for make_loss in (Weighted, lambda: Weighted().method, closure, lambda: partial(closure())):
        check_state(lambda: [nn.Tanh()], make_loss=make_loss)


def test_an_input_changed_through_data() -> None:
    """Symptom: `x.data.mul_` first in a stage: R saw it changed twice. Cause: the change bumps no version."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.data.mul_(2)
            return x * x

    check_state(lambda: [Doubles(), nn.Linear(4, 4)], ["two stages"])

    ours = nn.Sequential(Doubles(), nn.Linear(4, 4))
    reference = copy.deepcopy(ours)
    with Pipeline(ours, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        inputs, targets = batch()
        found = pipeline.step(inputs.clone(), targets)
        assert torch.equal(found, reference_step(reference, mean_square, inputs, targets, num_microbatches=3))
        assert_same_gradients(ours, reference)


def test_a_parameter_that_the_forward_changes_is_named() -> None:
    """Symptom: an average in a frozen parameter, kept up through `.data`: gradients off by up to 100 %, in every mode.

    Cause: forwards run before the backward of the microbatch before, which reads the parameter; `.data` bumps no version.
    """

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.mean.data.lerp_(x.detach().mean(0), 0.5)
            return x * self.mean

    for way in WAYS.values():
        options = {**way, "balance": [2, 1]} if "balance" in way else way
        with (
            Pipeline(
                [nn.Linear(4, 4), Average(), nn.Linear(4, 4)], mean_square, num_microbatches=3, **options
            ) as pipeline,
            pytest.raises(StateChanged, match=r"layer 1 \(Average\).mean is changed by the forward, through .data"),
        ):
            pipeline.step(*batch())


def test_a_parameter_made_in_the_forward_is_named() -> None:
    """Symptom: R made it again, and B gave its gradient to the one of the last forward. Cause: nobody looked."""

    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.inner = nn.Linear(4, 4)
            return self.inner(x)

    pipeline = Pipeline([Lazy(), nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS)
    with pytest.raises(ValueError, match=r"layer 0 \(Lazy\) makes the parameter 0.inner.weight in its forward"):
        pipeline.step(*batch())


def test_an_object_in_the_inputs_that_a_forward_fills() -> None:
    """Symptom: filled twice, gradients off. Cause: R filled it again, and read what later forwards had filled in."""

    class Cache:
        def __init__(self) -> None:
            self.sums: list[Tensor] = []

    class Fills(nn.Module):
        def forward(self, value: tuple[Tensor, Cache]) -> Tensor:
            x, cache = value
            cache.sums.append(x.detach().sum())
            return x * x * torch.stack(cache.sums).sum()

    caches: list[Cache] = []

    def with_cache() -> tuple[Any, Tensor]:
        caches.append(Cache())
        inputs, targets = batch()
        return (inputs, caches[-1]), targets

    for policy in (ALWAYS, RecomputePolicy("never")):
        ours = nn.Sequential(Fills(), nn.Linear(4, 4))
        reference = copy.deepcopy(ours)
        with Pipeline(ours, mean_square, num_microbatches=3, recompute=policy) as pipeline:
            found = pipeline.step(*with_cache())
            expected = reference_step(reference, mean_square, *with_cache(), num_microbatches=3)
            assert torch.equal(found, expected)
            assert_same_gradients(ours, reference)
        assert len(caches[-2].sums) == len(caches[-1].sums) == 3


@pytest.mark.filterwarnings("ignore:layer . .Remembers. holds")
def test_a_large_tensor_attribute_is_not_kept_and_not_read_in_silence() -> None:
    """Symptom: wrong gradients where a layer reads what its last forward left in an attribute. Cause: R saw the newest."""

    class Remembers(nn.Module):
        def __init__(self, *, reads: bool) -> None:
            super().__init__()
            self.last = torch.zeros(20_000, 4)
            self.reads = reads

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.last[: len(x)] if self.reads else x
            self.last = torch.zeros(20_000, 4) + x.detach().sum()
            return y * y

    check_state(lambda: [Remembers(reads=False), nn.Linear(4, 4)])
    with (
        Pipeline(
            [Remembers(reads=True), nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS
        ) as pipeline,
        pytest.raises(StateChanged, match=r"layer 0 \(Remembers\).last is read in the recompute"),
    ):
        pipeline.step(*batch())


def test_a_sparse_buffer() -> None:
    """Symptom: NotImplementedError of a graph network's adjacency matrix. Cause: the meter asked it for a storage."""

    class Spreads(nn.Module):
        def __init__(self, layout: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.register_buffer("adjacency", layout(torch.eye(2).roll(1, 0)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.adjacency, x) * x

    for layout in (Tensor.to_sparse, Tensor.to_sparse_csr):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a beta state
            check_state(lambda layout=layout: [Spreads(layout), nn.Linear(4, 4)])


def test_a_cache_that_is_filled_when_needed() -> None:
    """Symptom: R's path differed from F's. Cause: the first forward fills the cache, and R finds it filled."""

    class Rotates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Tensor] = {}
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.cache:
                self.cache[len(x)] = torch.arange(4.0).requires_grad_().exp().detach()
            if self.table is None:
                self.table = torch.ones(20_000, 4)
            return x * x * self.cache[len(x)] * self.table[: len(x)]

    check_state(lambda: [Rotates(), nn.Linear(4, 4)])


def test_a_lazy_layer_in_the_model_is_named() -> None:
    """Symptom: "Attempted to use an uninitialized parameter". Cause: nobody asked whether parameters have a shape."""
    with pytest.raises(ValueError, match=r"layer 1 \(LazyLinear\).weight has no shape yet, as in a LazyLinear"):
        Pipeline([nn.Linear(4, 4), nn.LazyLinear(4)], mean_square, num_microbatches=3)


def test_nested_buffers() -> None:
    """Symptom: NotImplementedError or RuntimeError of torch. Cause: the meter asked a nested tensor for its storage."""

    class Nested(nn.Module):
        def __init__(self, layout: torch.layout) -> None:
            super().__init__()
            self.register_buffer(
                "rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout), persistent=False
            )

        def forward(self, x: Tensor) -> Tensor:
            return x * x * self.rows.unbind()[0].sum()

    for layout in (torch.jagged, torch.strided):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a prototype
            check_state(lambda layout=layout: [Nested(layout), nn.Linear(4, 4)], ["overlap", "never"])


def test_a_lazy_layer_somewhere_in_the_process() -> None:
    """Symptom: ValueError "uninitialized parameter" in the first step. Cause: the probe looks at every tensor alive."""
    lazy = nn.LazyLinear(4)
    check_state(lambda: [nn.Tanh()], ["overlap"])
    del lazy


# What needs a gradient, and whose.


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Chooses(nn.Linear):
    """Gives whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def chosen() -> list[nn.Module]:
    return [nn.Linear(4, 4), Chooses(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4)]


@EVERY_MODE
@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 2], [1, 2, 1]], ids=str)
def test_stage_whose_output_needs_no_gradient(recompute: RecomputePolicy, balance: list[int]) -> None:
    """Symptom: `KeyError: 0` in B of a stage with parameters that ends in argmax or detach.

    Cause: F held nothing for a B that the schedule has, as the stage has parameters. The plain loop gives them no gradient.
    """
    check(chosen, recompute=recompute, stages=len(balance), balance=balance)
    layers = [nn.Linear(4, 4), Detached(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    check(lambda: copy.deepcopy(layers), recompute=recompute, stages=len(balance), balance=balance)


def step_with_a_choice() -> None:
    for mode in ("overlap", "inline", "never"):
        options = {"num_microbatches": 3, "balance": [2, 2], "recompute": mode}
        check_case(Case(mode, chosen, lambda: [batch()] * 2, mean_square, options=options))


def test_stage_whose_output_needs_no_gradient_on_a_rank_of_its_own() -> None:
    run_ranks(2, step_with_a_choice)


@EVERY_MODE
def test_loss_that_needs_no_gradient(recompute: RecomputePolicy) -> None:
    """Symptom: `KeyError: 0`. Cause: as above, for the loss; the plain loop refuses it, too."""
    layers = [nn.Linear(4, 4), Detached(4, 4)]
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, num_stages=2, stages_per_rank=2, recompute=recompute)
    with pytest.raises(ValueError, match=r"loss_fn returned a loss that needs no gradient, although .*detach\(\)"):
        pipeline.step(*batch())


def refused_in_step(message: str, layers: Sequence[nn.Module], loss: Any = mean_square, **options: Any) -> None:
    """A step of it is refused with such a message, whether sets are recomputed or kept."""
    for mode in (ALWAYS, "never"):
        with (
            pytest.raises(ValueError, match=message),
            Pipeline(layers, loss, num_microbatches=3, recompute=mode, **{**TWO_STAGES, **options}) as pipeline,
        ):
            pipeline.step(*batch())


TWO_STAGES: dict[str, Any] = {"num_stages": 2, "stages_per_rank": 2, "schedule": "interleaved"}


def test_a_step_where_no_gradients_are_made() -> None:
    """Symptom: `step` under `no_grad` or `inference_mode` ended in an internal KeyError or in autograd's words, in the midst of its ops.

    Cause: nobody asked whether gradients are made here. Now it is refused before any op, and the pipeline goes on.
    """
    for no_gradients in (torch.no_grad, torch.inference_mode):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        reference = copy.deepcopy(model)
        with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
            with (
                no_gradients(),
                pytest.raises(ValueError, match=rf"step was called under torch.{no_gradients.__name__}\(\)"),
            ):
                pipeline.step(*batch())
            assert torch.equal(
                pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
            )


def test_inputs_that_require_a_gradient() -> None:
    """Symptom: inputs with `requires_grad` got no `.grad`, and whatever had computed them none either; no word.

    Cause: what enters stage 0 is detached, as it must be where it comes from another rank.
    """
    inputs, targets = batch()
    for mode in (ALWAYS, "never"):
        with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=mode) as pipeline:
            for wrong in (inputs.clone().requires_grad_(), nn.Linear(4, 4)(inputs)):
                with pytest.raises(
                    ValueError,
                    match="inputs requires a gradient: a step gives gradients to the layers' parameters only",
                ):
                    pipeline.step(wrong, targets)
        pipeline = Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=mode)
        with pytest.raises(ValueError, match="targets requires a gradient"):
            pipeline.step(inputs, targets.clone().requires_grad_())


def test_a_loss_with_parameters_of_its_own() -> None:
    """Symptom: the parameters of a `loss_fn` had gradients and were in no `parameters()`, clip or `state_dict`; no word.

    Cause: a pipeline knows its layers, and nobody looked at what the loss is made of.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.weight * (output - target) ** 2).mean()

        def method(self, output: Tensor, target: Tensor) -> Tensor:
            return self(output, target)

    def of(loss: Weighted, output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target)

    own = Weighted()
    for loss in (own, own.method, functools.partial(of, own)):
        with pytest.raises(
            ValueError,
            match=r"loss_fn has parameters of its own to train \(weight\).*make what has them the last layer",
        ):
            Pipeline([nn.Linear(4, 4)], loss, num_microbatches=3)
    refused_in_step("^loss_fn uses a tensor .*weight", [nn.Linear(4, 4), nn.Linear(4, 4)], lambda *both: own(*both))
    own.requires_grad_(False)
    with Pipeline([nn.Linear(4, 4)], own, num_microbatches=3) as pipeline:
        pipeline.step(*batch())


def test_a_weight_tied_by_a_hidden_reference() -> None:
    """Symptom: a layer that used a layer of another stage (in a list, so that nothing registered it) trained with wrong gradients.

    Cause: its rank has its own copy of that layer, whose gradient nobody added; only registered parameters were compared.
    """

    class Tied(nn.Module):
        def __init__(self, first: nn.Linear) -> None:
            super().__init__()
            self.linear, self.first = nn.Linear(4, 4), [first]

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.first[0].weight

    first = nn.Linear(4, 4)
    refused_in_step(r"^layer 1 \(Tied\) uses 0.weight, which is of another stage", [first, Tied(first)])


def test_a_regulariser_over_all_layers() -> None:
    """Symptom: a `loss_fn` with a term over all layers: the stages before the last trained without it, and no word.

    Cause: on the last rank these layers are copies, whose gradients went nowhere.
    """
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + sum(p.square().sum() for layer in layers for p in layer.parameters())

    refused_in_step(r"^loss_fn uses 0\.(weight|bias), which is of another stage", layers, loss)


def test_a_constant_that_requires_a_gradient() -> None:
    """Symptom: a tensor with `requires_grad` in a closure or an attribute of a layer: in no `parameters()`, clip or `state_dict`.

    Cause: F's graph was never compared with the parameters of the stage.
    """
    scale = torch.ones(4, requires_grad=True)

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    refused_in_step(
        r"^layer 1 \(Scaled\) uses a tensor \[4\] that requires a gradient.*\(scale of Scaled\)",
        [nn.Linear(4, 4), Scaled(4, 4)],
    )


def test_statistics_shared_over_stages() -> None:
    """Symptom: one BatchNorm without parameters in two stages: each rank kept statistics of its own, which diverged; no word.

    Cause: only parameters were looked for in two stages.
    """
    norm = nn.BatchNorm1d(4, affine=False)
    layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)]
    refused_in_step(r"^buffer 1.(\w+) of stage 0 is 3.\1 of stage 1 as well, and a forward changed it", layers)


def test_a_buffer_that_stays_may_be_shared_over_stages() -> None:
    """A table that all layers look into, or a shared ReLU, is right on every stage: not everything shared is refused."""

    class Positions(nn.Linear):
        def __init__(self, table: Tensor) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table

    table, relu = torch.linspace(0, 1, 4), nn.ReLU()
    model = nn.Sequential(Positions(table), relu, Positions(table), relu, Positions(table))
    reference = copy.deepcopy(model)
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS, **TWO_STAGES) as pipeline:
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


def test_a_counter_shared_over_stages() -> None:
    """Symptom: a module without parameters that counts its calls, in two stages: each rank counted its own.

    Cause: only parameters were looked for in two stages.
    """

    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    counter = Counter()
    with (
        pytest.raises(ValueError, match="Counter 1 of stage 0 is 3 of stage 1 as well, and a forward changed it"),
        Pipeline(
            [nn.Linear(4, 4), counter, nn.Linear(4, 4), counter],
            mean_square,
            num_microbatches=3,
            recompute="never",
            **TWO_STAGES,
        ) as pipeline,
    ):
        pipeline.step(*batch())


def test_parameters_that_look_into_one_memory() -> None:
    """Symptom: `b.weight.data = a.weight.data` over two stages trained as two weights; no word.

    Cause: parameters were compared as objects. Flat parameters, which lie side by side in one storage, are no mistake.
    """
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"0.weight of stage 0 and 1.weight of stage 1 lie in one memory"):
        Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES)
    second.weight.data = first.weight.data.clone()
    flat = nn.utils.parameters_to_vector([*first.parameters(), *second.parameters()]).detach()
    nn.utils.vector_to_parameters(flat, [*first.parameters(), *second.parameters()])
    Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES).close()


def test_callables_that_return_one_layer() -> None:
    """Symptom: two callables that returned one and the same layer, for two stages, trained one weight as two.

    Cause: sharing was looked for in what was given, not in what was built.
    """
    layer = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"parameter 0.weight of stage 0 is 1.weight of stage 1 as well, and only a rank"
    ):
        Pipeline([lambda: layer, lambda: layer], mean_square, num_microbatches=3, **TWO_STAGES)


# Microbatches that do not count.


class NormedRoot(nn.Module):
    """Running means that see every microbatch that runs, and a derivative that is endless at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).abs().sqrt())


def does_not_count(loss_of_nothing: float, recompute: str | RecomputePolicy) -> None:
    """A batch whose second microbatch is padding: zeros as inputs, and nothing in its targets counts."""
    torch.manual_seed(0)
    model = nn.Sequential(NormedRoot(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    reference = copy.deepcopy(model)
    inputs, targets = batch()
    inputs[2:4], targets[2:4] = 0.0, -99.0

    def count(target: Tensor) -> int:
        return int((target != -99.0).sum())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) if count(target) else output.sum() * loss_of_nothing

    options = {"num_microbatches": 3, "count_fn": count}
    with Pipeline(model, loss_fn, stages_per_rank=2, balance=[1, 2], recompute=recompute, **options) as pipeline:
        loss = pipeline.step(inputs, targets)
    assert torch.equal(loss, reference_step(reference, loss_fn, inputs, targets, **options))
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), reference.buffers()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recompute", ["never", ALWAYS], ids=str)
@pytest.mark.parametrize("loss_of_nothing", [0.0, float("inf")])
def test_a_microbatch_that_counts_nothing(loss_of_nothing: float, recompute: str | RecomputePolicy) -> None:
    """Symptom: the loss was finite and gradients were NaN; running means had moved four times in three counted microbatches.

    Cause: a microbatch with n_i = 0 ran F on every stage, and zeros went back through its graph, where they met 0 * inf.
    The plain loop leaves it out.
    """
    does_not_count(loss_of_nothing, recompute)


@pytest.mark.parametrize("given", [float("nan"), None, -1])
def test_a_count_that_is_no_number(given: float | None) -> None:
    """Symptom: with count_fn giving nan the loss was nan without a reason; None gave "unsupported operand type(s) for +".

    Cause: what it gave was added up as it came.
    """
    pipeline = Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, count_fn=lambda target: given)
    with pytest.raises(ValueError, match=f"count_fn gave {given} for the target of microbatch 0: it must return"):
        pipeline.step(*batch())


# What crosses a cut.


class Then(nn.Module):
    """Tanh and a linear layer of 8 columns on `pick(input)`; gives `function(what it got, its own output)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], pick: Callable[[Any], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.pick = pick

    def forward(self, x: Any) -> Any:
        return self.function(
            x, self.linear(torch.tanh(self.pick(x)))
        )  # saves no output, which may then be changed in place


def only(x: Any, y: Tensor) -> Tensor:
    return y


MODES: tuple[Any, ...] = ("never", ALWAYS)
THREE_OVER_A_CUT: dict[str, Any] = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 3}


def cases_of(name: str, layers: Callable[[], list[nn.Module]], **options: Any) -> list[Case]:
    """With sets kept and with all of them recomputed; three steps."""
    size = len(layers())
    batches = options.pop("batches", lambda: rows(8, 8, 8))
    before_step = options.pop("before_step", lambda step, model: None)
    return [
        Case(
            f"{name}, {mode}",
            layers,
            batches,
            options={"recompute": mode, "balance": [1] * size, "num_microbatches": 3, **options},
            before_step=before_step,
        )
        for mode in MODES
    ]


def on_ranks(num_ranks: int, name: str) -> None:
    """The cases that the function `name` makes, a stage per layer: all on one rank, or in turns on two."""
    if num_ranks == 1:
        run_cases(cases_by_name, name, num_ranks)
    else:
        run_ranks(num_ranks, run_cases, cases_by_name, name, num_ranks)


def cases_by_name(name: str, num_ranks: int) -> list[Case]:
    cases: list[Case] = globals()[name]()
    return [
        replace(case, options={**case.options, **_spread(len(case.options["balance"]) // num_ranks)}) for case in cases
    ]


def _spread(stages_per_rank: int) -> dict[str, Any]:
    return {"schedule": "interleaved" if stages_per_rank > 1 else "gpipe", "stages_per_rank": stages_per_rank}


def lazy_bits() -> list[Case]:
    """What `conj` and `imag` of a conjugate give: a view with a bit that says how its bytes are meant."""

    def conjugate(x: Any, y: Tensor) -> Any:
        return torch.complex(y, y * 2).conj()

    def negative(x: Any, y: Tensor) -> Any:
        return (y, torch.complex(y, y * 2).conj().imag)

    def real(x: Any) -> Tensor:
        return (x * (1 + 2j)).real

    return [
        *cases_of("conjugate", lambda: [Then(conjugate), Then(only, real)]),
        *cases_of("negative", lambda: [Then(negative), Then(only, lambda x: x[0] * x[1])]),
        *cases_of(
            "gradient",
            lambda: [Then(lambda x, y: torch.complex(y, y)), Then(only, lambda x: (x.conj() * (1 + 2j)).real)],
        ),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_lazy_bits_at_a_cut(num_ranks: int) -> None:
    """Symptom: with `x.conj()` at the end of a stage the loss was 1.281 for 1.476, on one rank too.

    Cause: the bytes of a lazy conjugate are those of its base; its gate and its message took the bytes alone.
    """
    on_ranks(num_ranks, "lazy_bits")


def add_in_place(x: Any) -> Tensor:
    x[0].add_(1.0)
    return x[0] * x[1]


def halves(x: Any, y: Tensor) -> Any:
    both = torch.cat((y, y), 1)
    return both[:, :8], both[:, 8:]


def same_tensor_twice() -> list[Case]:
    def twice(x: Any, y: Tensor) -> Any:
        return (y, {"again": y}, y * 2)

    def pick(x: Any) -> Tensor:
        x[0].mul_(3.0)
        return x[0] * x[1]["again"] + x[2]

    def passed_on() -> list[nn.Module]:
        return [
            Then(twice),
            Then(lambda x, y: (x[0], x[1]["again"], y), lambda x: x[0]),
            nn.Identity(),
            Then(only, add_in_place),
        ]

    def parts() -> list[nn.Module]:
        return [Then(halves), Then(only, add_in_place)]

    def overlapping() -> list[nn.Module]:
        return [Then(lambda x, y: (y, y[:, :4])), Then(only, lambda x: x[0] + x[1].repeat(1, 2))]

    return [
        *cases_of("twice", lambda: [Then(twice), Then(only, pick)]),
        *cases_of("passed on", passed_on),
        *cases_of("parts of one tensor", parts),
        *cases_of("overlapping, not changed", overlapping),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_tensor_twice_at_a_cut(num_ranks: int) -> None:
    """Symptom: with `(h, h)` at a cut and a next layer that changes one of them in place, the loss was 1.99 for 3.77.

    Cause: each leaf was sent, and given a gate, by itself.
    """
    on_ranks(num_ranks, "same_tensor_twice")


def overlapping_and_changed() -> list[Case]:
    cases = cases_of("", lambda: [Then(lambda x, y: (y, y[:, 4:])), Then(only, lambda x: x[0].add_(1.0))])
    return [replace(case, options={**case.options, **THREE_OVER_A_CUT}) for case in cases]


def test_views_with_common_entries_at_a_cut() -> None:
    """Symptom: with `(h, h[:, :4])` at a cut and a next layer that changes one of them in place, the loss was 1.99 for 3.77.

    Cause: on another rank they have no memory in common. (Two leaves are one tensor, or look at memory that nobody changes.)
    """
    for case in overlapping_and_changed():
        with pytest.raises(
            SavedTensorChanged, match=r"output\[0\] of layer 0 \(Then\).* memory of output\[1\]: clone one"
        ):
            check_case(case)


class Tells(nn.Module):
    """A linear layer whose output, beside itself, is told by `tell(step, output)`; a model has one such count of steps."""

    def __init__(self, tell: Callable[[int, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tell = tell
        self.step = 0

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, self.tell(self.step, y)


def count_steps(step: int, model: nn.Sequential) -> None:
    for layer in model:
        if isinstance(layer, (Tells, UsesInTurns)):
            layer.step = step


def used(x: Any) -> Tensor:
    return x[0] if x[1] is None else x[0] * x[1]


def changing_gradients() -> list[Case]:
    steps = {"before_step": count_steps, "batches": lambda: rows(8, 8, 8, 8)}

    def detached_at_first(step: int, y: Tensor) -> Any:
        return (y * 2).detach() if step < 2 else y * 2

    def without_graph_in_turns(step: int, y: Tensor) -> Any:
        with torch.set_grad_enabled(step % 2 == 0):
            return y * 2

    return [
        *cases_of("detached at first", lambda: [Tells(detached_at_first), Then(only, used)], **steps),
        *cases_of("no_grad in turns", lambda: [Tells(without_graph_in_turns), Then(only, used)], **steps),
        *cases_of("used in turns", lambda: [Then(lambda x, y: (y, y * 2)), UsesInTurns()], **steps),
    ]


class UsesInTurns(nn.Module):
    """Needs the first part of its input in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Any) -> Tensor:
        return x[0] * x[1] if self.step % 2 else x[1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_needs_a_gradient_changes_inside_a_layer(num_ranks: int) -> None:
    """Symptom: a branch that was detached in the first steps never got a gradient later; between ranks, without a word.

    Cause: the receiver took the form of an earlier step, by which the tensor needed none.
    """
    on_ranks(num_ranks, "changing_gradients")


Pair = collections.namedtuple("Pair", "mean spread")


def values_and_structures() -> list[Case]:
    steps = {"before_step": count_steps}

    def differing(step: int, y: Tensor) -> Any:
        return [1, True, 0.5][step]

    def growing(step: int, y: Tensor) -> Any:
        return torch.ones(8)[: 8 if step == 1 else 1]

    def named(x: Any, y: Tensor) -> Any:
        return Pair(y, {(0, "a"): y * 2, 1: collections.OrderedDict(b=y.max(dim=1, keepdim=True))})

    def pick(x: Any) -> Tensor:
        return x.mean + x.spread[0, "a"] * x.spread[1]["b"].values

    def flag(x: Any, y: Tensor) -> Any:
        return y, x["flag"]

    def flags() -> list[Any]:
        return [({"x": x, "flag": flag}, y) for (x, y), flag in zip(rows(8, 8, 8), (2.0, -0.5, 3))]

    return [
        *cases_of("a value per step", lambda: [Tells(differing), Then(only, used)], **steps),
        *cases_of("a shape per step", lambda: [Tells(growing), Then(only, used)], **steps),
        *cases_of("a value of the batch", lambda: [Then(flag, lambda x: x["x"]), Then(only, used)], batches=flags),
        *cases_of("named tuples", lambda: [Then(named), Then(only, pick)]),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_and_structures_at_a_cut(num_ranks: int) -> None:
    """Symptom: a plain value that differed from step to step failed with "changed its form"; named tuples, `torch.return_types` and
    keys that are tuples with "NotImplementedError: No registered serialization name".

    Cause: values were taken for a part of the form, and structures written by torch's own function, which knows few types.
    """
    on_ranks(num_ranks, "values_and_structures")


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Parts:
    one: Tensor


class Marked(Tensor):
    """A tensor of a type of its own."""


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda y: (y, y.to_sparse()), r"output\[1\] as a tensor with the layout sparse_coo: return its indices"),
    "nested": (lambda y: {"n": torch.nested.nested_tensor([y[0], y[1]])}, r"output\['n'\] as a nested tensor"),
    "jagged": (lambda y: torch.nested.as_nested_tensor([y[0], y[1]], layout=torch.jagged), "output as a NestedTensor"),
    "quantized": (lambda y: (y, torch.quantize_per_tensor(y, 0.1, 0, torch.qint8)), "as a quantized tensor"),
    "meta": (lambda y: (y, y.to("meta")), r"output\[1\] as a tensor on meta, and the stages are on cpu"),
    "subclass": (lambda y: [y.as_subclass(Marked)], r"output\[0\] as a Marked, .*as_subclass\(torch.Tensor\)"),
    "enum": (lambda y: (y, Colour.RED), r"output\[1\] as an enum, .*: return its .value"),
    "dataclass": (lambda y: (y, Parts(y)), r"output\[1\] as a Parts, a dataclass that torch does not look into"),
    "set": (lambda y: (y, {1}), r"output\[1\] as a set: stages exchange"),
    "key": (lambda y: {Colour.RED: y}, "a dict with the key .* of type .*Colour: take strings"),
    "local type": (lambda y: collections.namedtuple("Local", "a")(y), "which other ranks cannot import by its name"),
}


@pytest.mark.filterwarnings("ignore:.*(sparse|nested|quantize).*:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_cross_a_cut_is_named(name: str) -> None:
    """Symptom: "unsupported operation: sparse tensor as_strided", "Cannot access storage", or nothing on one rank.

    Cause: nobody looked at what a stage returned before its bytes were taken.
    """
    make, message = REFUSED[name]
    for mode in ("never", ALWAYS):
        pipeline = Pipeline(
            [Then(lambda x, y: make(y)), nn.Linear(8, 8)], mean_square, recompute=mode, **THREE_OVER_A_CUT
        )
        with pytest.raises(TypeError, match=r"layer 0 \(Then\), the last of stage 0, returned .*" + message):
            pipeline.step(*rows(8)[0])


def test_whole_goes_to_the_device() -> None:
    """Symptom: on a GPU, "Expected all tensors to be on the same device" for what was wrapped in Whole.

    Cause: tensors of the batch were moved leaf by leaf, and Whole is a leaf that is no tensor.
    """
    batch = {"x": torch.ones(2, 1), "whole": Whole({"mask": (torch.ones(3), 5)})}
    moved = on_device(batch, lambda tensor: tensor.to("meta"))
    mask, number = moved["whole"].value["mask"]
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
    pipeline = Pipeline([first, second], loss_fn, **THREE_OVER_A_CUT, recompute=mode)
    targets = {"y": y, "w": Whole(torch.ones(8))} if place == "targets" else y
    with pytest.raises(SavedTensorChanged, match=f"stage .* changes in place: {name}, which is Whole"):
        pipeline.step((x, Whole((1, torch.ones(8)))), targets)


def test_targets_changed_in_place_where_the_loss_is_recomputed() -> None:
    """Symptom: `loss_fn` changed its target in place, and under `last_stage=always` R computed another loss than F.

    Cause: R gives it the same tensor a second time.
    """

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ((output * target.mul_(2.0)) ** 2).mean()

    pipeline = Pipeline([nn.Linear(8, 8)], loss_fn, num_microbatches=3, recompute=ALWAYS)
    with pytest.raises(SavedTensorChanged, match=r"stage 0, .* changes in place: leaf 0 of its target"):
        pipeline.step(*rows(8)[0])


# Arguments.


def test_two_runs_that_start_in_one_new_folder(tmp_path: pathlib.Path) -> None:
    """Symptom: two runs started in the same new `run_dir` at the same moment both ran, and wrote over each other.

    Cause: a folder was taken once `config.yaml` lay in it, which is written long after it was looked for.
    """
    (tmp_path / "text.txt").write_text("a stage waits for a stage that runs " * 500)
    options = ["experiment=smoke", "data=text", "data.path=text.txt", "pipeline.num_stages=1", "steps=2", "run_dir=new"]
    root = str(pathlib.Path(__file__).resolve().parents[1])
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pipetrain.train", *options],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = sorted((run.communicate(timeout=PATIENCE_SECONDS)[1], run.returncode) for run in runs)
    assert sorted(code for _, code in ends) == [0, 2], ends
    (told,) = (error for error, code in ends if code == 2)
    # Where one has ended before the other begins, that finds its configuration.
    assert "another run is in this folder" in told or "there is a run in this folder" in told


def test_two_runs_without_a_folder_that_start_in_one_second(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two runs without `run_dir` that started in the same second could share a folder.

    Cause: a free name was chosen first, and its folder made later.
    """
    monkeypatch.chdir(tmp_path)
    taken = choose_folder(None, "run").path
    names = iter([taken, taken, taken.with_name("next")])
    monkeypatch.setattr(folder, "choose_folder", lambda *_: folder.RunFolder(next(names)))
    assert folder.reserve_folder(None, "run").path == taken
    assert folder.reserve_folder(None, "run").path == taken.with_name("next")


@pytest.mark.parametrize("field", ["forward", "backward", "recompute", "hop", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, [1.0, math.nan]])
def test_costs_are_finite(field: str, seconds: float | list[float]) -> None:
    """Symptom: `pipetrain show cost.forward_seconds=nan` never ended.

    Cause: no time is later than nan, so the simulated step had no next moment.
    """
    with pytest.raises(ValueError, match=f"cost.{field}_seconds=.*(nan|inf|-1)"):
        Costs.spread(2 + (field == "hop"), **{field: seconds})
    with pytest.raises(ValueError, match=r"recompute=\[nan\]: costs are finite numbers, 0 or more"):
        Costs((1.0,), (1.0,), (math.nan,), (), ())


def test_a_schedule_that_is_too_large_is_refused() -> None:
    """Symptom: `pipetrain show pipeline.num_stages=99999999` never ended, nor did a schedule of so many microbatches.

    Cause: there was no limit, and every op of it was to be made.
    """
    with pytest.raises(ValueError, match=r"99999999 stages .* are too many: allowed are 4096"):
        make_schedule(num_stages=99999999, num_microbatches=1)
    with pytest.raises(ValueError, match=r"num_microbatches=99999999 with 4 stages.*=32768"):
        make_schedule(num_stages=4, num_microbatches=99999999)


def test_what_does_not_run_yet_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a run whose schedule has I and W was refused by its ranks, after its run folder was made.

    Cause: only the executor knew which kinds of ops it runs.
    """
    monkeypatch.setitem(vars(Kind.W), "row", replace(Kind.W.row, runs=False))  # today it runs
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0F0,0I0,0W0\n")
        file.flush()
        options = ["experiment=smoke", f"pipeline.schedule={file.name}", "pipeline.num_microbatches=1"]
        with pytest.raises(ValueError, match="0W0: the runtime does not run W yet, only F, R, B, I, SEND_F"):
            prepare(load([*options, "pipeline.num_stages=1", "recompute=never"]))


def test_arguments_that_are_no_numbers() -> None:
    """Symptom: `num_microbatches=2.5` or `timeout_seconds=-1` ended in raw errors later, `balance=[1.5, 1.5]` was cut to `[1, 1]`.

    Cause: only their range was looked at, or nothing.
    """
    wrong: dict[str, Any] = {
        "num_microbatches": 2.5,
        "num_stages": 1.0,
        "stages_per_rank": True,
        "balance": [1.5, 0.5],
        "timeout_seconds": -1,
        "seed": 1 << 64,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ")):
            Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mean_square, **{name: value})
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        for scale in (0, float("nan"), float("inf"), "2", torch.tensor(2.0)):
            with pytest.raises(ValueError, match=r"step was given scale="):
                pipeline.step(*batch(), scale=scale)


def test_batches_that_are_no_tensors() -> None:
    """Symptom: a numpy array went whole to every microbatch, or failed in the midst of a layer; a list of numbers likewise.

    Cause: what is no tensor counts as a plain value, which each microbatch gets.
    """
    inputs, targets = batch()
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        with pytest.raises(ValueError, match=r"^inputs is a numpy.ndarray, which is not cut: .*torch.from_numpy"):
            pipeline.step(inputs.numpy(), targets)
        with pytest.raises(ValueError, match=r"^targets is a list of 6 plain values, as many as the batch has rows"):
            pipeline.step(inputs, list(range(6)))


def test_clipping_to_a_norm_that_is_none() -> None:
    """Symptom: `clip_grad_norm_(-1)` turned every gradient round; nan made them nan; no word.

    Cause: whatever was given was divided by the norm.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        pipeline.step(*batch())
        before = [parameter.grad.clone() for parameter in pipeline.parameters()]
        for norm in (-1, float("nan"), "1"):
            with pytest.raises(ValueError, match=r"clip_grad_norm_ was given max_norm=.*: a number, 0 or more"):
                pipeline.clip_grad_norm_(norm)
        for parameter, gradient in zip(pipeline.parameters(), before):
            assert torch.equal(parameter.grad, gradient)


def test_clipping_sparse_gradients() -> None:
    """Symptom: `clip_grad_norm_` raised NotImplementedError after a step with `nn.Embedding(sparse=True)`.

    Cause: torch has no norm of a sparse tensor. That of its entries would be wrong: rows that meet are added first.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4))
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    tokens, targets = torch.tensor([0, 1, 0, 0, 1, 2]), batch()[1]
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(tokens, targets)
        reference_step(dense, mean_square, tokens, targets, num_microbatches=3)
        norm, expected = pipeline.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        assert torch.allclose(norm, expected)
        for own, wanted in zip(model.parameters(), dense.parameters()):
            assert torch.allclose(own.grad.to_dense(), wanted.grad)


def test_a_state_of_another_model() -> None:
    """Symptom: a misspelt name in the state was ignored, and the layer kept its old buffer or extra tensors vanished; no word.

    Cause: each layer picked what it knows.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        state = pipeline.state_dict()
        for name in ("0.wieght", "1.weight", "weight"):
            with pytest.raises(ValueError, match=f"the state has '?{name}.*which the model does not"):
                pipeline.load_state_dict({**state, name: state["0.weight"]})
        with pytest.raises(ValueError, match=r"0.weight is a list in the state"):
            pipeline.load_state_dict({**state, "0.weight": [1.0]})
