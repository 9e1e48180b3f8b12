"""Clipping takes the norm of sparse gradients, too, and refuses a norm that is none."""

from __future__ import annotations

import copy

import pytest
import torch
from beside_the_loop import ALWAYS, batch, mean_square
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step


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
