"""Memory that a layer holds outside of saved tensors is named; what it keeps once is not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from one_rank import make_stages, run_step
from parity_cases import mean_square
from torch import Tensor, nn

from pipetrain.stage.meter import ActivationMeter

M = 4
ROWS, WIDTH = 64, 1024  # a microbatch of 16 rows: 65,536 bytes


def warnings_of(layers: Sequence[nn.Module]) -> list[str]:
    x = torch.randn(ROWS, WIDTH)
    stages = make_stages(list(layers), [len(layers)], mean_square, ActivationMeter())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            run_step(stages, x, x, M, prove=lambda microbatch, step=step: not microbatch and not step, step=step)
    return [str(warning.message) for warning in caught]


class _HoldsInContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = torch.tanh(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.x


class HoldsInContext(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _HoldsInContext.apply(super().forward(x))


class HoldsEach(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.each: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.each.append(y.detach() * 2)
        return y


class HoldsTable(nn.Linear):
    """Makes a table at its first call and keeps it."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(WIDTH, 64).sum(1).repeat(64)
        return super().forward(x) + self.table[:WIDTH]


class _HoldsLittle(_HoldsInContext):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x[:1, :1].clone()
        return x * 2


class HoldsLittle(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _HoldsLittle.apply(super().forward(x))


def test_held_in_the_context_of_a_function() -> None:
    (message,) = warnings_of([nn.Linear(WIDTH, WIDTH), HoldsInContext(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    assert re.search(
        r"layer 1 \(HoldsInContext\) holds 65536 bytes per microbatch outside of its saved tensors", message
    )


def test_held_by_the_layer() -> None:
    (message,) = warnings_of([HoldsEach(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    assert message.startswith("layer 0 (HoldsEach) changes its attribute each in each forward: its saved tensors (")


def test_what_is_no_leak() -> None:
    assert warnings_of([HoldsTable(WIDTH, WIDTH), HoldsLittle(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) == []
