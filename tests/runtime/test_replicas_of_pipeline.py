"""Replicas of a pipeline train as one loop over all their microbatches does, also where they share the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from replica_models import MICROBATCHES, SHAPES, assert_replicas_equal, batch, difference, layers, mean_square
from rounding import rounding
from torch import Tensor, nn

from pipetrain.optim.optimizer import ShardedOptimizer
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.op import Lane

NUM_STEPS = 4


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def sharded(pipeline: Pipeline, **options: float) -> Any:
    """Ours around an optimizer."""
    groups = [{"params": list(pipeline.parameters()), **options}]
    return ShardedOptimizer(groups, torch.optim.SGD, pipeline.replica_process_group())  # type: ignore[arg-type]


def of_torch(pipeline: Pipeline, **options: float) -> Any:
    """Torch's own, as who uses the library has it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # two seconds

    group = pipeline.replica_process_group()
    return ZeroRedundancyOptimizer(pipeline.parameters(), torch.optim.SGD, process_group=group, **options)


OPTIMIZERS: dict[str, Any] = {"sharded": sharded, "of torch": of_torch}


def steps(name: str, optimizer: str = "") -> list[float]:
    """Dropout on, clip active: gradients, norms and weights of each step beside the plain loop. Returns the norms."""
    shape = SHAPES[name]
    reference = nn.Sequential(*layers())
    m = MICROBATCHES * shape.num_replicas
    close = rounding(torch.float32, terms=m)  # the loss and each gradient: a sum over all microbatches
    norms = []
    with shape.pipeline() as pipeline:
        own = dict(pipeline.named_parameters())
        options = {"lr": 0.05, "momentum": 0.9 if optimizer else 0.0}
        theirs = torch.optim.SGD(reference.parameters(), **options)
        ours = OPTIMIZERS[optimizer](pipeline, **options) if optimizer else torch.optim.SGD(own.values(), **options)
        for step in range(NUM_STEPS):
            inputs, targets = batch(step)
            rows = pipeline.own_rows({"inputs": inputs, "targets": targets})
            loss = pipeline.step(
                rows["inputs"] if pipeline.is_first else None, rows["targets"] if pipeline.is_last else None
            )
            expected = reference_step(reference, mean_square, inputs, targets, num_microbatches=m, step=step)
            assert difference(loss, expected) <= close
            wanted = dict(reference.named_parameters())
            found = difference(flat([own[one].grad for one in own]), flat([wanted[one].grad for one in own]))  # type: ignore[misc]
            assert found <= close, f"gradients of step {step}: {found:.1e}"
            norm = pipeline.clip_grad_norm_(0.1)
            close_norm = rounding(torch.float32, terms=len(wanted))  # a sum over all parameters, here stage by stage
            assert difference(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1)) <= close_norm
            norms.append(float(norm))
            for one in (ours, theirs):
                one.step()
                one.zero_grad()
            assert_replicas_equal(pipeline)
        found = difference(flat(list(own.values())), flat([wanted[one] for one in own]))
        assert found <= rounding(torch.float32, terms=m * NUM_STEPS), f"weights after {NUM_STEPS} steps: {found:.1e}"
        reduced = [event.op for event in pipeline.report.events if event.lane is Lane.REDUCE]
        assert reduced == list(pipeline.schedule.lane(pipeline.coordinates.stage, Lane.REDUCE))
        assert reduced
        if optimizer == "sharded":
            held: list[Any] = [None] * shape.num_ranks
            dist.all_gather_object(held, {one for one, weight in own.items() if ours.state.get(weight)})
            for first, second in ((held[0], held[2]), (held[1], held[3])):
                assert first
                assert second
                assert not first & second
    return norms


@pytest.mark.quick("4 x 1")
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "2 x 2"])
def test_steps_beside_the_plain_loop(name: str) -> None:
    norms = run_ranks(SHAPES[name].num_ranks, steps, name)
    assert all(of_rank == norms[0] for of_rank in norms), "the norm is not the same on every rank"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_with_the_state_over_the_replicas(optimizer: str) -> None:
    run_ranks(4, steps, "2 x 2", optimizer)
