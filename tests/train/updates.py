"""A small stage and its updates, for tests of optimizers."""

from __future__ import annotations

import torch
from torch import nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.loss import next_token_loss
from pipetrain.models.spec import make_spec, with_weights_in
from pipetrain.optim.optimizer import Updates


def stage_in(dtype: torch.dtype, *, num_hidden_layers: int) -> nn.Sequential:
    """An embedding and some blocks."""
    config = ModelConfig(num_hidden_layers=num_hidden_layers, hidden_size=32, num_attention_heads=2)
    spec = with_weights_in(make_spec(config, 64), dtype)
    return nn.Sequential(*spec.build(0, 2 + num_hidden_layers, seed=3))


def train_stage(model: nn.Module, optimizer: Updates, steps: range, *, rate: float | None) -> None:
    """The same gradients on every rank, as they are after the reduction. `rate`: of the first step; None: as the optimizer has it."""
    for step in steps:
        for group in optimizer.param_groups if rate is not None else ():
            group["lr"] = rate / (step + 1)
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            ids = torch.randint(0, 64, (2, 17), generator=generator)
            next_token_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(weight.grad is None for weight in model.parameters())
