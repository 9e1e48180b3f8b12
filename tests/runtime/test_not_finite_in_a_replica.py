"""A loss or a gradient that is not finite in one replica: every rank learns of it, and the next step is as if there had been none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import mean_square, rows
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding
from torch import Tensor, nn

from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

MICROBATCHES, REPLICAS = 2, 2
# As norm of the difference over norm: gradients are summed microbatch by microbatch, in each replica and then over the replicas.
STEP_TOLERANCE = rounding(torch.float32, terms=MICROBATCHES * REPLICAS)
BROKEN = 77.0


class _Break(torch.autograd.Function):
    """Gradients of a row that begins with `BROKEN` are infinite."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value[:, :1] == BROKEN)
        return value.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (is_broken,) = ctx.saved_tensors
        return gradient.masked_fill(is_broken, float("inf"))


class Breakable(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        broken: Tensor = _Break.apply(value * self.weight)
        return broken

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Breakable(), nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 8)
    )


def pipeline_of(layers: nn.Sequential) -> Pipeline:
    return Pipeline(
        layers,
        mean_square,
        num_microbatches=MICROBATCHES,
        num_replicas=REPLICAS,
        schedule="1f1b",
        timeout_seconds=NEVER_SECONDS,
    )


def step(pipeline: Pipeline, batch: tuple[Tensor, Tensor]) -> Tensor:
    return pipeline.step(*(pipeline.own_rows(one) for one in batch))


def reference(layers: nn.Sequential, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
    return reference_step(layers, mean_square, *batch, num_microbatches=MICROBATCHES * REPLICAS, step=number)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return float((flat(ours) - flat(theirs)).norm() / flat(theirs).norm())


def assert_gradients(pipeline: Pipeline, whole: nn.Sequential) -> None:
    expected = dict(whole.named_parameters())
    names, ours = zip(*pipeline.named_parameters())
    found = difference([one.grad for one in ours], [expected[name].grad for name in names])  # type: ignore[misc]
    assert found <= STEP_TOLERANCE, found


def said_by_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse() -> None:
    whole = model()
    with pipeline_of(copy.deepcopy(whole)) as pipeline:
        inputs, targets = rows(8)[0]
        last_row = torch.arange(8).unsqueeze(1) == 7  # of the second replica
        with pytest.raises(LossNotFinite) as error:
            step(pipeline, (inputs, targets.masked_fill(last_row, float("nan"))))
        assert error.value.microbatch == 3
        assert len({str(one) for one in said_by_all(str(error.value))}) == 1
        pipeline.zero_grad()
        loss = step(pipeline, (inputs.masked_fill(last_row, BROKEN), targets))
        assert torch.isfinite(loss)
        norm = float(pipeline.clip_grad_norm_(1.0))
        assert said_by_all(norm) == [float("inf")] * 4 or all(one != one for one in said_by_all(norm)), norm
        pipeline.zero_grad()
        pipeline.check_replicas()
        assert torch.allclose(
            step(pipeline, (inputs, targets)),
            reference(whole, (inputs, targets), pipeline.step_index - 1),
            rtol=STEP_TOLERANCE,
        )
        assert_gradients(pipeline, whole)


def test_a_step_that_is_not_finite_in_one_replica() -> None:
    run_ranks(4, refuse)
