"""A step gives gradients where the plain loop gives them, and refuses what would get none without a word."""

from __future__ import annotations

import copy

import pytest
from beside_the_loop import EVERY_MODE, check, refused
from torch import Tensor, nn

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


@EVERY_MODE
def test_loss_that_needs_no_gradient(recompute: RecomputePolicy) -> None:
    """Symptom: `KeyError: 0`. Cause: as above, for the loss; the plain loop refuses it, too."""
    layers = [nn.Linear(4, 4), Detached(4, 4)]
    message = r"loss_fn returned a loss that needs no gradient, although .*detach\(\)"
    refused(ValueError, message, layers, num_stages=2, stages_per_rank=2, recompute=recompute)
