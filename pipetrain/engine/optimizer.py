"""AdamW on this rank's parameters, and its learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pipetrain.config.records import OptimConfig


def make_optimizer(config: OptimConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), fused; vectors (norms, biases) are not decayed."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, fused=True
    )


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of `step` (from 1): a line up to step `warmup_steps`, then a cosine to `final_fraction` at `num_steps`."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    cosine = (1.0 + math.cos(math.pi * min(progress, 1.0))) / 2.0
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)
