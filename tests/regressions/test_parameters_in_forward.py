"""An error names the parameter that a forward changes or makes, or that has no shape yet."""

from __future__ import annotations

import pytest
import torch
from beside_the_loop import WAYS, check_state, mean_square, refused
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.stage.errors import StateChanged


def test_a_parameter_that_the_forward_changes_is_named() -> None:
    """Symptom: an average in a frozen parameter, kept up through `.data`: gradients off by up to 100 %, in every mode.

    Cause: forwards run before the backward of the microbatch before, which reads the parameter; `.data` bumps no version.
    """

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.mean.data.lerp_(x.detach().mean(0), 0.5)
            return x * self.mean

    for way in WAYS.values():
        options = {**way, "balance": [2, 1]} if "balance" in way else way
        layers = [nn.Linear(4, 4), Average(), nn.Linear(4, 4)]
        refused(StateChanged, r"layer 1 \(Average\).mean is changed by the forward, through .data", layers, **options)


def test_a_parameter_made_in_the_forward_is_named() -> None:
    """Symptom: R made it again, and B gave its gradient to the one of the last forward. Cause: nobody looked."""

    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.inner = nn.Linear(4, 4)
            return self.inner(x)

    message = r"layer 0 \(Lazy\) makes the parameter 0.inner.weight in its forward"
    refused(ValueError, message, [Lazy(), nn.Linear(4, 4)])


def test_a_lazy_layer_in_the_model_is_named() -> None:
    """Symptom: "Attempted to use an uninitialized parameter". Cause: nobody asked whether parameters have a shape."""
    with pytest.raises(ValueError, match=r"layer 1 \(LazyLinear\).weight has no shape yet, as in a LazyLinear"):
        Pipeline([nn.Linear(4, 4), nn.LazyLinear(4)], mean_square, num_microbatches=3)


def test_a_lazy_layer_somewhere_in_the_process() -> None:
    """Symptom: ValueError "uninitialized parameter" in the first step. Cause: the probe looks at every tensor alive."""
    lazy = nn.LazyLinear(4)
    check_state(lambda: [nn.Tanh()], ["overlap"])
    del lazy
