"""A step gives gradients where the plain loop gives them, and refuses what would get none without a word."""

from __future__ import annotations

import copy

import pytest
import torch
from beside_the_loop import ALWAYS, EVERY_MODE, batch, check, mean_square
from parity_cases import Case, check_case
from ranks import run_ranks
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy


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
