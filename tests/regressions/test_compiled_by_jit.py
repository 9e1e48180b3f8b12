"""Layers of torch.jit train as in the plain loop where their activations are kept."""

import copy

import pytest
import torch
from parity_cases import mean_square, rows
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [scripted, traced])
def test_a_jit_layer_has_parameters_without_get(make: object) -> None:
    """Symptom: `'OrderedModuleDict' object has no attribute 'get'` in the first step. Cause: its dicts are no dicts."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), make(), nn.Linear(8, 8)]  # type: ignore[operator]
    reference = nn.Sequential(*copy.deepcopy(layers))
    with Pipeline(layers, mean_square, num_microbatches=2, recompute="never") as pipeline:
        for step, (inputs, targets) in enumerate(rows(4, 4)):
            expected = reference_step(reference, mean_square, inputs, targets, num_microbatches=2, step=step)
            assert torch.equal(pipeline.step(inputs, targets), expected)
