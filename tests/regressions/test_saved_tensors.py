"""Recomputation gives backward the saved tensors of the forward, or the error names the layer that saves others."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from beside_the_loop import ALWAYS, EVERY_MODE, assert_same_gradients, batch, check, mean_square, refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.errors import RecomputeMismatch


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
    refused(RecomputeMismatch, message, layers)


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


class FillsLaterInTime(nn.Module):
    """From its second step on its last operation fills what it has saved."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(x, 0.1, 0.9, training=True) if IS_NOISY[0] else nn.functional.leaky_relu(x, 0.1)


IS_NOISY = [False]


def test_an_operation_that_fills_what_it_has_saved_begins_later() -> None:
    """Symptom: gradients of 1e25. Cause: R ended at its last slot, as was proved of another last operation."""

    policy = RecomputePolicy(last_stage="always", verify="first")
    options: dict[str, Any] = {"num_stages": 2, "stages_per_rank": 2, "schedule": "interleaved", "balance": [2, 1]}
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), FillsLaterInTime(), nn.Linear(4, 4))
    theirs = copy.deepcopy(ours)
    with Pipeline(ours, mean_square, num_microbatches=3, recompute=policy, **options) as pipeline:
        for step in range(2):
            IS_NOISY[0] = step > 0
            found = pipeline.step(*batch())
            assert torch.equal(found, reference_step(theirs, mean_square, *batch(), num_microbatches=3, step=step))
            assert_same_gradients(ours, theirs)


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
    message = r"layer 1 \(OtherOperation\): the recompute saves .* in F it was .*ExpBackward"
    refused(RecomputeMismatch, message, [nn.Linear(4, 4), OtherOperation(), nn.Linear(4, 4)])


def test_other_values_in_recompute() -> None:
    """Symptom: gradients of values that F has not seen, without a word.

    Cause: only shapes, types and operations of what R saves were compared with those of F.
    """
    own = itertools.count()

    class Drifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x + (next(own) > 4))  # 3 F, and a copy of the layer ahead of the first and behind it

    layers = [nn.Linear(4, 4), Drifts(), nn.Linear(4, 4)]
    message = r"layer 1 \(Drifts\): the recompute saves a tensor \[2, 4\] float32 made by SigmoidBackward with other values: \d of 8 entries differ, by up to .*a counter, a cache"
    refused(RecomputeMismatch, message, layers)
