"""The layers of one stage."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pipetrain.model.spec import ModelSpec
from pipetrain.plan.plan import Plan
from pipetrain.schedule.policy import layer_numbers


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


def kept_layers(entries: Sequence[str], stages: Mapping[int, Sequence[nn.Module]], plan: Plan) -> set[int]:
    """The layers of this rank's `stages` that `recompute.keep_layers` names, by their number in the model.

    Raises:
        ValueError: a kind of layer that no layer has, where this rank has all of them; with the nearest that there is.
    """
    layers = {number: layer for index, own in stages.items() for number, layer in zip(plan.layers_of(index), own)}
    kinds = {type(layer).__name__ for layer in layers.values()}
    kept: set[int] = set()
    for text in entries:
        numbers = layer_numbers(text)
        if numbers is None and text not in kinds and len(layers) == plan.num_layers:
            nearest = difflib.get_close_matches(text, sorted(kinds), n=1, cutoff=0.0)
            raise ValueError(f"recompute.keep_layers={text}: no layer is of that class; did you mean {nearest[0]!r}?")
        kept |= {n for n, layer in layers.items() if (n in numbers if numbers else type(layer).__name__ == text)}
    return kept
