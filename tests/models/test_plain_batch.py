"""Batches of dicts for models that know token ids alone."""

from __future__ import annotations

import pytest
import torch
from torch import equal

from pipetrain.config.records import ModelConfig
from pipetrain.models.spec import make_spec
from pipetrain.models.transformer import plain_batch

IDS = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
TARGETS = torch.tensor([[6, 7, -100, -100], [6, 7, 8, -100]])


def test_filling_at_the_end_changes_nothing_that_counts() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    inputs, targets = plain_batch({"input_ids": IDS, "attention_mask": mask}, TARGETS)
    assert inputs is IDS
    assert targets is TARGETS
    spec = make_spec(ModelConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2), 9)
    model = torch.nn.Sequential(*spec.build(0, 3))
    assert spec.loss_fn is not None
    other = IDS.clone()
    other[0, 3] = 4  # what stands in the filling does not matter
    assert equal(spec.loss_fn(model(IDS), TARGETS), spec.loss_fn(model(other), TARGETS))


def test_plain_ids_and_ranks_that_have_none() -> None:
    assert plain_batch(IDS, None) == (IDS, None)
    assert plain_batch(None, TARGETS) == (None, TARGETS)


def test_what_would_be_silently_wrong() -> None:
    with pytest.raises(ValueError, match=r"data.layout=packed .* use data.layout=padded, or model=hf"):
        plain_batch({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}, TARGETS)
    with pytest.raises(ValueError, match="filled up at their end alone"):
        plain_batch({"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, TARGETS)
