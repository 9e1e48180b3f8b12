"""One step of each family of schedules on one rank has the loss and the gradients of a plain loop, bit for bit."""

import copy

import pytest
import torch
from parity_cases import assert_same_gradients, mean_square, plain, rows

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

FAMILIES = {"gpipe": 3, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "auto": 1}  # with stages per rank


@pytest.mark.parametrize("mode", ["overlap", "never"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step(family: str, mode: str) -> None:
    torch.manual_seed(0)
    layers = plain(0.1)
    reference = torch.nn.Sequential(*copy.deepcopy(layers))
    ((inputs, targets),) = rows(9)
    pipe = Pipeline(
        layers, mean_square, num_microbatches=4, schedule=family, recompute=mode, stages_per_rank=FAMILIES[family]
    )
    with pipe as pipeline:
        loss = pipeline.step(inputs, targets)
        expected = reference_step(reference, mean_square, inputs, targets, num_microbatches=4)
        assert torch.equal(loss, expected)
        assert_same_gradients(pipeline, reference)
