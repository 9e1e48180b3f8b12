"""Cutting a batch, joining outputs, and what each microbatch weighs."""

from __future__ import annotations

import pytest
import torch
from parity_cases import mean_square, rows
from rounding import rounding
from torch import nn

from pipetrain.runtime.cut import Whole, counts_of, cut, join, row_counts, rows_fault, shares_of_rows, weights_of
from pipetrain.runtime.reference import reference_step


def test_leaf_by_leaf_on_dimension_0() -> None:
    x, mask = torch.arange(10).view(5, 2), torch.ones(3)
    parts = cut({"x": x, "pair": (x[:, 0], None), "mask": Whole(mask), "word": "a"}, 3)
    assert [len(part["x"]) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), x[:, 0])
    assert all(part["mask"] is mask and part["word"] == "a" and part["pair"][1] is None for part in parts)
    assert torch.equal(join([part["x"] for part in parts]), x)


def test_weights_are_shares() -> None:
    assert weights_of([3, 3, 2]) == [3 / 8, 3 / 8, 2 / 8]
    assert weights_of([0, 1, 0]) == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="not all 0"):
        weights_of([0, 0])


def test_rows_or_counts_of_the_targets() -> None:
    targets = torch.tensor([1, -1, -1, 1, 1])
    parts = cut(targets, 2)
    assert shares_of_rows(5, 2) == (3 / 5, 2 / 5)
    assert row_counts(5, 2) == [len(part) for part in parts]
    assert weights_of(counts_of(parts, lambda part: int((part > 0).sum()))) == [1 / 3, 2 / 3]
    assert rows_fault(5, 5) is None
    assert rows_fault(None, 6) is None
    assert rows_fault(5, 6) == "targets have 5 rows on the last rank, inputs 6 on the first"


def test_the_reference_is_the_mean_over_all_rows_of_an_uneven_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ((inputs, targets),) = rows(11)
    whole = mean_square(model(inputs), targets)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    loss = reference_step(model, mean_square, inputs, targets, num_microbatches=4)
    within = rounding(torch.float32, terms=11 * 8)  # 11 rows of 8 are summed in one piece, and in four
    assert torch.allclose(loss, whole, rtol=within)
    for parameter, gradient in zip(model.parameters(), expected):
        assert (parameter.grad - gradient).norm() <= within * gradient.norm()
