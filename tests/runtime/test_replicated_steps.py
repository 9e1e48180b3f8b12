"""Two replicas of two stages: what comes after the backward. Gradients added up over several steps, the norm and the clip, steps that are
refused, and optimizers whose state the replicas share."""

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

from pipetrain.optim.zero import ShardedOptimizer
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

MICROBATCHES, REPLICAS = 2, 2
TENSORS = 7
# As norm of the difference over norm. Gradients of up to three steps are added up microbatch by microbatch, in each replica and then over
# the replicas; weights after ten steps have taken as many of them, clipped by a norm over all tensors.
STEP_TOLERANCE = rounding(torch.float32, terms=3 * MICROBATCHES * REPLICAS)
NORM_TOLERANCE = rounding(torch.float32, terms=3 * MICROBATCHES * REPLICAS + TENSORS)
RUN_TOLERANCE = rounding(torch.float32, terms=10 * (MICROBATCHES * REPLICAS + TENSORS))
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


# Accumulation and the clip --------------------------------------------------------------------------------------------------


def accumulate_and_clip() -> None:
    """Three steps without a `zero_grad`: what earlier ones left is in the sum once, not once per replica."""
    whole = model()
    with pipeline_of(copy.deepcopy(whole)) as pipeline:
        for number, batch in enumerate(rows(7, 9, 8)):
            loss = step(pipeline, batch)
            assert torch.allclose(loss, reference(whole, batch, number), rtol=STEP_TOLERANCE)
            assert_gradients(pipeline, whole)
        norm = pipeline.clip_grad_norm_(0.05)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        assert float(norm) > 0.05, "nothing is clipped"
        assert torch.allclose(norm, wanted, rtol=NORM_TOLERANCE), f"norm {norm}, expected {wanted}"
        assert len(set(said_by_all(float(norm)))) == 1, "another norm on another rank"
        assert_gradients(pipeline, whole)
        assert float(pipeline.clip_grad_norm_(float("inf"))) == pytest.approx(0.05, rel=1e-5)


# A step that is refused -----------------------------------------------------------------------------------------------------


def refuse() -> None:
    """Trouble in one replica alone: all ranks learn of it, and the next step is as if there had been none."""
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


# Ten steps with the state over the replicas -----------------------------------------------------------------------------------


def ten_steps(of_torch: bool) -> None:
    """Ours around an optimizer, or torch's own, as who uses the library has it: ten clipped steps beside the whole model's."""
    whole = model()
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    with pipeline_of(copy.deepcopy(whole)) as pipeline:
        group = pipeline.replica_process_group()
        assert group is not None
        optimizer: Any
        if of_torch:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # two seconds

            optimizer = ZeroRedundancyOptimizer(
                pipeline.parameters(), torch.optim.SGD, process_group=group, lr=0.1, momentum=0.9
            )
        else:
            groups = [{"params": list(pipeline.parameters()), "lr": 0.1, "momentum": 0.9}]
            optimizer = ShardedOptimizer(groups, torch.optim.SGD, group)
        for number, batch in enumerate(rows(*[8] * 10)):
            step(pipeline, batch)
            reference(whole, batch, number)
            norm = pipeline.clip_grad_norm_(0.2)
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.2)
            assert float(norm) > 0.2, "nothing is clipped"
            for one in (optimizer, plain):
                one.step()
            optimizer.zero_grad()
            plain.zero_grad()
            pipeline.check_replicas()
        weights = dict(whole.named_parameters())
        names, ours = zip(*pipeline.named_parameters())
        found = difference(list(ours), [weights[name] for name in names])
        assert found <= RUN_TOLERANCE, found
        if not of_torch:
            held = said_by_all({name for name, weight in pipeline.named_parameters() if optimizer.state.get(weight)})
            for first, second in ((held[0], held[2]), (held[1], held[3])):
                assert first
                assert second
                assert not first & second


def on_a_rank() -> None:
    accumulate_and_clip()
    refuse()


def test_what_comes_after_the_backward() -> None:
    run_ranks(4, on_a_rank)


@pytest.mark.slow
@pytest.mark.parametrize("of_torch", [False, True])
def test_ten_steps_with_the_state_over_the_replicas(of_torch: bool) -> None:
    run_ranks(4, ten_steps, of_torch)
