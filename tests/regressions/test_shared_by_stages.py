"""A pipeline refuses a parameter, buffer or counter that two stages share, or that no stage owns, where training would go wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from beside_the_loop import ALWAYS, KEPT_WARNINGS, batch, mean_square, refused
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step


def refused_in_step(message: str, layers: Sequence[nn.Module], loss: Any = mean_square) -> None:
    """A step of it is refused with such a message, whether sets are recomputed or kept."""
    for mode in (ALWAYS, "never"):
        refused(ValueError, message, layers, loss, recompute=mode, **TWO_STAGES)


TWO_STAGES: dict[str, Any] = {"num_stages": 2, "stages_per_rank": 2, "schedule": "interleaved"}


def test_a_loss_with_parameters_of_its_own() -> None:
    """Symptom: the parameters of a `loss_fn` had gradients and were in no `parameters()`, clip or `state_dict`; no word.

    Cause: a pipeline knows its layers, and nobody looked at what the loss is made of.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.weight * (output - target) ** 2).mean()

        def method(self, output: Tensor, target: Tensor) -> Tensor:
            return self(output, target)

    def of(loss: Weighted, output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target)

    own = Weighted()
    for loss in (own, own.method, functools.partial(of, own)):
        with pytest.raises(
            ValueError,
            match=r"loss_fn has parameters of its own to train \(weight\).*make the module that has them the last layer",
        ):
            Pipeline([nn.Linear(4, 4)], loss, num_microbatches=3)
    refused_in_step("^loss_fn uses a tensor .*weight", [nn.Linear(4, 4), nn.Linear(4, 4)], lambda *both: own(*both))
    own.requires_grad_(False)
    with Pipeline([nn.Linear(4, 4)], own, num_microbatches=3) as pipeline:
        pipeline.step(*batch())


def test_a_regulariser_over_all_layers() -> None:
    """Symptom: a `loss_fn` with a term over all layers: the stages before the last trained without it, and no word.

    Cause: on the last rank these layers are copies, whose gradients went nowhere.
    """
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + sum(p.square().sum() for layer in layers for p in layer.parameters())

    refused_in_step(r"^loss_fn uses 0\.(weight|bias), which is of another stage", layers, loss)


def test_statistics_shared_over_stages() -> None:
    """Symptom: one BatchNorm without parameters in two stages: each rank kept statistics of its own, which diverged; no word.

    Cause: only parameters were looked for in two stages.
    """
    norm = nn.BatchNorm1d(4, affine=False)
    layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)]
    refused_in_step(r"^buffer 1.(\w+) of stage 0 is 3.\1 of stage 1 as well, and a forward changed it", layers)


def test_a_buffer_that_stays_may_be_shared_over_stages() -> None:
    """A table that all layers look into, or a shared ReLU, is right on every stage: not everything shared is refused."""

    class Positions(nn.Linear):
        def __init__(self, table: Tensor) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table

    table, relu = torch.linspace(0, 1, 4), nn.ReLU()
    model = nn.Sequential(Positions(table), relu, Positions(table), relu, Positions(table))
    reference = copy.deepcopy(model)
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS, **TWO_STAGES) as pipeline:
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


@KEPT_WARNINGS
def test_a_counter_shared_over_stages() -> None:
    """Symptom: a module without parameters that counts its calls, in two stages: each rank counted its own.

    Cause: only parameters were looked for in two stages.
    """

    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    counter = Counter()
    layers = [nn.Linear(4, 4), counter, nn.Linear(4, 4), counter]
    refused_in_step("Counter 1 of stage 0 is 3 of stage 1 as well, and a forward changed it", layers)


def test_parameters_that_look_into_one_memory() -> None:
    """Symptom: `b.weight.data = a.weight.data` over two stages trained as two weights; no word.

    Cause: parameters were compared as objects. Flat parameters, which lie side by side in one storage, are no mistake.
    """
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"0.weight of stage 0 and 1.weight of stage 1 lie in one memory"):
        Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES)
    second.weight.data = first.weight.data.clone()
    flat = nn.utils.parameters_to_vector([*first.parameters(), *second.parameters()]).detach()
    nn.utils.vector_to_parameters(flat, [*first.parameters(), *second.parameters()])
    Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES).close()


def test_callables_that_return_one_layer() -> None:
    """Symptom: two callables that returned one and the same layer, for two stages, trained one weight as two.

    Cause: sharing was looked for in what was given, not in what was built.
    """
    layer = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"parameter 0.weight of stage 0 is 1.weight of stage 1 as well, and only a rank"
    ):
        Pipeline([lambda: layer, lambda: layer], mean_square, num_microbatches=3, **TWO_STAGES)
