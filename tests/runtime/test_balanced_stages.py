"""A pipeline gives its last stage more layers where that makes a step shorter, unless stages then share more or have no parameters."""

from __future__ import annotations

import copy

import torch
from ranks import run_ranks
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step


def test_layers_move_where_stages_stay_whole() -> None:
    assert run_ranks(2, balances) == [[(5, 7), (6, 6), (6, 6), (6, 6)]] * 2


def balances() -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    linears: list[nn.Module] = [nn.Linear(4, 4) for _ in range(12)]
    shared = [*linears[:5], linears[4], *linears[6:]]  # one module in layers 4 and 5
    bare = [*(nn.Tanh() for _ in range(5)), *linears[5:]]  # layer 5 is the first with parameters
    inputs = torch.randn(8, 4)
    expected = reference_step(nn.Sequential(*copy.deepcopy(linears)), loss, inputs, inputs, num_microbatches=8)
    found = []
    for layers, mode in ((linears, "overlap"), (linears, "never"), (shared, "overlap"), (bare, "overlap")):
        with Pipeline(layers, loss, recompute=mode) as pipeline:
            found.append(pipeline.plan.balance)
            value = pipeline.step(inputs, inputs)
            assert layers is not linears or torch.equal(value, expected)
    return found


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()
