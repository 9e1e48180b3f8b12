"""Layers of every kind for one stage, and the batch and meter that go with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from one_rank import make_stages
from parity_cases import mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.stage.meter import ActivationMeter

M = 4


def batch(rows: int = 11, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def meter_of(model: nn.Module) -> ActivationMeter:
    meter = ActivationMeter()
    meter.exclude([*model.parameters(), *model.buffers()])
    return meter


def one_stage(*layers: nn.Module, meter: ActivationMeter | None = None) -> Any:
    model = nn.Sequential(*layers)
    return make_stages(list(model), [len(layers)], mean_square, meter or meter_of(model))


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 1, 2, 4)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).flatten(1) + x


class Checkpointed(nn.Module):
    """torch's own recomputation inside of ours."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors  # a node may read twice
        return gradient * (y + again) / 2


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SavesItsOutput.apply(torch.tanh(x))


class InPlaceInside(nn.Module):
    """Changes in place what nobody saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        return y.sigmoid_()


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear and dropout": lambda: [linear(), nn.Tanh(), linear(), nn.Dropout(0.3), linear(), nn.Sigmoid()],
    "dropout last": lambda: [linear(), nn.Tanh(), linear(), nn.ReLU(), linear(), nn.Dropout(0.3)],
    "batch norm": lambda: [linear(), nn.BatchNorm1d(8), linear(), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), linear()],
    "spectral norm": lambda: [
        nn.utils.parametrizations.spectral_norm(linear()),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(linear()),
        *(nn.Tanh(), linear(), linear()),
    ],
    "in place after a layer": lambda: [linear(), linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear()],
    "in place on the input of each stage": lambda: [nn.ReLU(inplace=True), linear(), nn.ELU(inplace=True), linear(), nn.ReLU(inplace=True), linear()],
    "in place inside": lambda: [InPlaceInside(), linear(), InPlaceInside(), linear(), InPlaceInside(), linear()],
    "recurrent": lambda: [Recurrent(), linear(), nn.Tanh(), linear(), Recurrent(), linear()],
    "attention": lambda: [linear(), Attends(), linear(), Attends(), linear(), Attends()],
    "checkpoint inside": lambda: [Checkpointed(reentrant=False), linear(), Checkpointed(reentrant=False), *(linear() for _ in range(3))],
    "reentrant checkpoint": lambda: [linear(), Checkpointed(reentrant=True), linear(), Checkpointed(reentrant=True), linear(), linear()],
    "autograd function": lambda: [Custom(), linear(), Custom(), linear(), Custom(), linear()],
}  # fmt: skip


class GradInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            slope = torch.autograd.grad((y**3 * self.weight.detach()).sum(), y)[0]
        return (slope + x) * self.weight


class FunctionalGradInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: (y**2).sum())(x.detach())
        return x * slope


# Not in the layer: there R would put it back as it was.
CALLS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def count_call(layer: nn.Module) -> int:
    """The number of this call, from 1; those in R count, too."""
    CALLS[layer] = CALLS.get(layer, 0) + 1
    return CALLS[layer]


class Breaks(nn.Module):
    """Raises at its n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        if count_call(self) == self.at:
            raise KeyError("broken on purpose")
        return x * x
