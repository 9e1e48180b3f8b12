"""AdamW's groups, and the learning rate over the steps."""

import itertools

import pytest
import torch

from pipetrain.config.records import OptimConfig
from pipetrain.optim.optimizer import learning_rate, make_optimizer

CONFIG = OptimConfig(learning_rate=1.0, warmup_steps=10, final_fraction=0.1)


def test_vectors_are_not_decayed() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1, bias=False))
    layer[0].bias.requires_grad_(False)
    decayed, plain = make_optimizer(CONFIG, layer.parameters()).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 4), (1, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.9, 0.95)


def test_a_line_then_a_cosine() -> None:
    rates = [learning_rate(CONFIG, step, 110) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.55)  # half-way down, between 1 and a tenth
    assert rates[-1] == pytest.approx(0.1)
    assert all(before > after for before, after in itertools.pairwise(rates[9:]))


def test_short_runs_have_a_rate_too() -> None:
    assert learning_rate(CONFIG, 1, 1) == pytest.approx(0.1)
    assert learning_rate(OptimConfig(learning_rate=2.0, warmup_steps=0), 1, 1) == pytest.approx(0.2)
