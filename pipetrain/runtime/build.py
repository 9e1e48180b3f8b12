"""From what the user calls a model to the layers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pipetrain.plan.plan import Plan
from pipetrain.stage.seeding import generators_restored, weight_seed

Layer = nn.Module | Callable[[], nn.Module]


def layers_of(model: Any) -> list[Layer]:
    """The ordered layers of a model: modules, or callables that make them.

    Raises:
        TypeError: not a model that can be cut.
    """
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, Iterable) and not isinstance(model, (str, bytes, dict)):
        layers = list(model)
        if layers and all(callable(layer) for layer in layers):
            return layers
    raise TypeError(
        f"a model of type {type(model).__name__} cannot be cut: give an nn.Sequential, a list of layers, or a list of "
        "callables without arguments that return a layer each"
    )


def build_layers(
    layers: Sequence[Layer], numbers: Iterable[int], *, seed: int, device: torch.device
) -> list[nn.Module]:
    """The layers with these global indices, on `device`. Those that are callables are built, each from a seed of its own,
    so that the weights do not depend on which rank builds them."""
    built = []
    with generators_restored(torch.device("cpu")):
        for number in numbers:
            layer = layers[number]
            if not isinstance(layer, nn.Module):
                torch.default_generator.manual_seed(weight_seed(seed, number))
                layer = layer()
                if not isinstance(layer, nn.Module):
                    raise TypeError(
                        f"the callable for layer {number} returned a {type(layer).__name__}, not an nn.Module"
                    )
            built.append(layer.to(device))
    return built


def check_sharing(layers: Sequence[Layer], plan: Plan) -> None:
    """Refuse a parameter that two stages share.

    Raises:
        ValueError: with the names of the parameter in both stages.
    """
    owners: dict[int, tuple[int, str]] = {}
    for stage in range(plan.num_stages):
        for number in plan.layers_of(stage):
            layer = layers[number]
            if not isinstance(layer, nn.Module):
                continue
            for name, parameter in layer.named_parameters():
                other, where = owners.setdefault(id(parameter), (stage, f"{number}.{name}"))
                if other != stage:
                    raise ValueError(
                        f"parameter {where} of stage {other} is {number}.{name} of stage {stage} as well: a parameter that "
                        "two stages share is not supported; choose a balance that puts both layers on one stage, or untie them"
                    )


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
    layers: Sequence[Layer], plan: Plan, stage: int, seed: int, device: torch.device, *, checked: bool
) -> list[nn.Module]:
    """The layers of one stage, on `device`; `checked` refuses a stage without parameters."""
    numbers = plan.layers_of(stage)
    built = build_layers(layers, numbers, seed=seed, device=device)
    if checked:
        check_has_parameters(stage, built, numbers)
    return built
