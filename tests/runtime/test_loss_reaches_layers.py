"""A `loss_fn` that reads layers of another rank is refused by name when the pipeline is made, on every rank; any other passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cases import mean_square
from ranks import run_ranks
from torch import Tensor, nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.arguments import check_loss_is_local
from pipetrain.runtime.pipeline import Pipeline


class Experts(nn.Linear):
    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.aux = hidden.square().mean()
        return hidden


LAYERS = [Experts(4, 4) for _ in range(3)]
PLAN = make_plan(3, num_ranks=3, num_microbatches=2)


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(*LAYERS)
        self.scale = 0.1

    def plain(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * mean_square(output, target)

    def with_aux(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + self.aux

    @property
    def aux(self) -> Tensor:
        return sum((layer.aux for layer in self.model), torch.zeros(()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target)

    def aux_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + sum(m.aux for m in self.modules() if isinstance(m, Experts))


class LossOfLayers(nn.Module):
    """Has them in a list, which torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list(LAYERS)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + self.seen[0].aux


def with_list(output: Tensor, target: Tensor, layers: Any = None) -> Tensor:
    return mean_square(output, target) + sum(layer.aux for layer in layers)


def of_global(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output, target) + sum(layer.aux for layer in LAYERS)


def through_global(output: Tensor, target: Tensor) -> Tensor:
    return of_global(output, target)


def closed_over(thing: Any, read: Callable[[Any], Any]) -> Callable[..., Tensor]:
    return lambda output, target: mean_square(output, target) + read(thing)


MODEL, LAST = Model(), LAYERS[-1]
REFUSED: dict[str, tuple[Any, str]] = {
    "a list": (closed_over(LAYERS, lambda layers: layers[0].aux), r"thing\[0\] of closed_over"),
    "a dict": (closed_over({"first": LAYERS[0]}, lambda layers: layers["first"].aux), r"thing\['first'\] of closed_over"),
    "a layer": (closed_over(LAYERS[0], lambda layer: layer.aux), "thing of closed_over"),
    "a module in it": (closed_over(MODEL.layers, lambda layers: layers[0].aux), r"thing\.0 of closed_over"),
    "a partial": (functools.partial(with_list, layers=LAYERS), r"\['layers'\]\[0\] of partial"),
    "a method": (Trainer().with_aux, r"model\.0 of Trainer\.with_aux"),
    "all modules": (MODEL.aux_loss, r"layers\.0 of Model\.aux_loss"),
    "a module with a list": (LossOfLayers(), r"seen\[0\] of LossOfLayers"),
    "a global": (of_global, r"LAYERS\[0\] of of_global"),
    "a global of a global": (through_global, r"of_global\.LAYERS\[0\] of through_global"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_layers_of_another_rank_are_refused_by_name(name: str) -> None:
    loss_fn, path = REFUSED[name]
    message = rf"^loss_fn reads {path}, and layer 0 \(Experts\) is of stage 0 on another rank.*pipetrain\.add_loss\("
    with pytest.raises(ValueError, match=message) as raised:
        check_loss_is_local(loss_fn, dict(enumerate(LAYERS)), PLAN)
    assert "\n" not in str(raised.value)


PASSES: dict[str, Any] = {
    "a function of torch": nn.functional.mse_loss,
    "a module of torch": nn.CrossEntropyLoss(),
    "a layer of the last stage": closed_over(LAST, lambda layer: layer.aux),
    "a method of what has the model, and does not name it": Trainer().plain,
    "a method of the model": MODEL.loss,
    "a function that calls one": lambda output, target: MODEL.loss(output, target),
    "a frozen module of its own": closed_over(nn.Linear(4, 4).requires_grad_(False), lambda module: module.bias.sum()),
    "a long list": closed_over(list(range(200_000)), len),
}


@pytest.mark.parametrize("name", list(PASSES))
def test_any_other_loss_passes(name: str) -> None:
    check_loss_is_local(PASSES[name], dict(enumerate(LAYERS)), PLAN)


def test_on_one_rank_nothing_is_on_another() -> None:
    check_loss_is_local(
        of_global, dict(enumerate(LAYERS)), make_plan(3, num_ranks=1, stages_per_rank=3, num_microbatches=2)
    )


def error_of(*, as_callables: bool) -> str:
    made: list[Experts] = []

    def make() -> Experts:
        made.append(Experts(4, 4))
        return made[-1]

    layers = [make] * 2 if as_callables else [make(), make()]
    with pytest.raises(ValueError, match="add_loss") as raised:
        Pipeline(layers, closed_over(made, lambda layers: sum(layer.aux for layer in layers)), num_microbatches=2)
    return str(raised.value)


@pytest.mark.parametrize("as_callables", [False, True])
def test_every_rank_says_so(as_callables: bool) -> None:
    first, second = run_ranks(2, functools.partial(error_of, as_callables=as_callables))
    assert first == second
    assert first.startswith(
        "loss_fn reads thing[0] of closed_over, and layer 0 (Experts) is of stage 0 on another rank"
    )
