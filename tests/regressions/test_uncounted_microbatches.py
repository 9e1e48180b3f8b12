"""A microbatch that counts nothing changes no loss, gradient or running mean; a count that is no number is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from beside_the_loop import ALWAYS, batch, mean_square
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy


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
