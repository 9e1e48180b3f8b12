"""The museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.runtime.cut import Whole
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.slots import RecomputeMismatch

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
    options = {"schedule": "interleaved", "stages_per_rank": 2, "timeout_seconds": 10.0}
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

# Gradients inside a forward, and control flow of a layer's own. --- (12: 1, 2, 4, 13)

# State that a forward changes. --- (12: 3, 5, 8, 14, 15, 16)

# What needs a gradient, and whose. --- (12: 9, 10)

# Microbatches that do not count. --- (12: 6)

# What crosses a cut. --- (12: 7, 11, 12, 17)

# Arguments. --- (12: 18, 19, 20)
