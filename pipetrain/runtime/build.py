"""The layers of one stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipetrain.model.spec import ModelSpec
from pipetrain.plan.plan import Plan


def check_has_parameters(stage: int, layers: Sequence[nn.Module], numbers: range) -> None:
    """Refuse a stage that has nothing to train, unless the user asked for that balance.

    Raises:
        ValueError: with the layers of the stage.
    """
    if not any(True for layer in layers for _ in layer.parameters()):
        kinds = ", ".join(type(layer).__name__ for layer in layers)
        raise ValueError(
            f"pipeline.balance='auto' gives stage {stage} the layers {numbers.start} to {numbers.stop - 1} ({kinds}), which "
            "have no parameters: give balance=[...], the number of layers of each stage"
        )


def build_stage_layers(
    spec: ModelSpec, plan: Plan, stage: int, seed: int, device: torch.device, *, checked: bool
) -> list[nn.Module]:
    """The layers of one stage, on `device`; `checked` refuses a stage without parameters."""
    numbers = plan.layers_of(stage)
    built = spec.build(numbers.start, numbers.stop, seed=seed, device=device)
    if checked:
        check_has_parameters(stage, built, numbers)
    return built
