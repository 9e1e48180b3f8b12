"""A pipeline trains as the plain loop does where its first stage is frozen, or is unfrozen between steps."""

from __future__ import annotations

import copy

import pytest
import torch
from beside_the_loop import batch, mean_square
from ranks import NEVER_SECONDS, run_ranks
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.make import make_schedule


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
