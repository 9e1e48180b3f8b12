"""AdamW on this rank's parameters, and its learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipetrain.config.records import OptimConfig
from pipetrain.models.trained import Optimizer
from pipetrain.optim.masters import MASTER, Groups, MasterWeights, has_few_bits, take_float32_gradients
from pipetrain.optim.zero import ShardedOptimizer

MakeAdamW = Callable[[Groups, float, tuple[float, float]], torch.optim.Optimizer]


class Updates(Optimizer, Protocol):
    """An optimizer that a training loop can use."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...


def make_optimizer(
    config: OptimConfig,
    parameters: Iterable[torch.nn.Parameter],
    replicas: dist.ProcessGroup | None = None,
    adamw: MakeAdamW | None = None,
) -> Updates:
    """AdamW (Loshchilov and Hutter 2019), torch's (fused) or what `adamw` makes of groups, learning rate and betas; vectors (norms, biases)
    are not decayed.

    bfloat16 weights have float32 masters, unless `config.masters` is off: then updates and AdamW's state are bfloat16 too. State and
    masters are divided over `replicas`, the ranks that have the same parameters, where they are given (ZeRO 1).
    """
    given = list(parameters)
    trained = [parameter for parameter in given if parameter.requires_grad]
    groups: Groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if not trained:  # a rank below the first adapter trains nothing
        return _adamw(config, groups[:1], adamw)
    groups = [group for group in groups if group["params"]]
    has_masters = config.masters == "auto" and any(map(has_few_bits, trained))
    if has_masters:
        take_float32_gradients(trained)

    def make(own: Groups) -> Updates:
        if has_masters:
            return MasterWeights(own, lambda masters: _adamw(config, masters, adamw))
        return _adamw(config, own, adamw)

    return make(groups) if replicas is None else ShardedOptimizer(groups, make, replicas)


def _adamw(config: OptimConfig, groups: Groups, adamw: MakeAdamW | None) -> torch.optim.Optimizer:
    if adamw is not None:
        return adamw(groups, config.learning_rate, config.betas)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    optimizer.register_load_state_dict_pre_hook(_without_masters)
    return optimizer


def _without_masters(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that had masters, for one that has none; kept, they would be taken up again when they are old."""
    state = {
        number: {key: value for key, value in entries.items() if key != MASTER}
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of `step` (from 1): a line up to step `warmup_steps`, then a cosine to `final_fraction` at `num_steps`."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    cosine = (1.0 + math.cos(math.pi * min(progress, 1.0))) / 2.0
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)
