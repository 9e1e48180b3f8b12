"""A pipeline gives its last stage more layers where that makes a step shorter, unless stages then share more or have no parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step


def test_layers_move_where_stages_stay_whole() -> None:
    assert run_ranks(2, balances) == [[(5, 7), (6, 6), (6, 6), (8, 4)]] * 2


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


def balance_of(*layers: nn.Module, num_stages: int = 2) -> tuple[int, ...]:
    """Of so many stages on one rank, which train."""
    with Pipeline(layers, loss, stages_per_rank=num_stages, num_microbatches=2, recompute="never") as pipeline:
        inputs = torch.randn(4, 4)
        pipeline.step(inputs, inputs)
        return pipeline.plan.balance


def test_layers_count_by_their_weights() -> None:
    assert balance_of(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Tanh()) == (1, 3)
    assert balance_of(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 4)) == (2, 2)
    assert balance_of(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64), nn.Linear(64, 4)) == (3, 1)


def test_a_convolution_does_what_its_weights_do_not_say() -> None:
    wide = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 64, 3, padding=1), nn.Conv1d(64, 1, 3, padding=1), nn.Flatten()
    )
    assert balance_of(wide, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) == (2, 2)


def test_a_stage_without_parameters_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"stage 1 the layers 1 to 1 .ReLU., which have no parameters: choose fewer stages, or give"
    ):
        balance_of(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), num_stages=3)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()
