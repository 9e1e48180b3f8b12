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
