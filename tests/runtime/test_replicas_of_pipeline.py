"""Replicas of a pipeline train as one loop over all their microbatches does, and survivors name the replica that is lost."""

from __future__ import annotations

import os
import re

import pytest
import torch
from ranks import run_outcomes, run_ranks
from replica_models import MICROBATCHES, SHAPES, Shape, assert_replicas_equal, batch, difference, layers, mean_square
from rounding import rounding
from torch import Tensor, nn

from pipetrain.comm.failure import PipelineError
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.op import Lane, Op


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


FAST = ("2 x 2", "4 x 1", "2 x 2, all kept, in parts")


def ten_steps(name: str, num_steps: int = 10) -> list[float]:
    """Dropout on, clip active: gradients, norms and weights of each step beside the plain loop. Returns the norms."""
    shape = SHAPES[name]
    reference = nn.Sequential(*layers())
    m = MICROBATCHES * shape.num_replicas
    close = rounding(torch.float32, terms=m)  # the loss and each gradient: a sum over all microbatches
    norms = []
    with shape.pipeline() as pipeline:
        own = dict(pipeline.named_parameters())
        ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.05) for model in (pipeline, reference))
        for step in range(num_steps):
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
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_replicas_equal(pipeline)
        found = difference(flat(list(own.values())), flat([wanted[one] for one in own]))
        assert found <= rounding(torch.float32, terms=m * num_steps), f"weights after {num_steps} steps: {found:.1e}"
        reduced = [event.op for event in pipeline.report.events if event.lane is Lane.REDUCE]
        assert reduced == list(pipeline.schedule.lane(pipeline.coordinates.stage, Lane.REDUCE))
        assert bool(reduced) == (shape.num_replicas > 1)
    return norms


@pytest.mark.quick("4 x 1")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_ten_steps_beside_the_plain_loop(name: str) -> None:
    norms = run_ranks(SHAPES[name].num_ranks, ten_steps, name)
    assert all(of_rank == norms[0] for of_rank in norms), "the norm is not the same on every rank"


def loses(name: str, at_rank: int, at: str) -> str:
    with pytest.raises(PipelineError) as caught:
        steps_until_lost(SHAPES[name], at_rank, Op.parse(at))
    return str(caught.value)


def steps_until_lost(shape: Shape, at_rank: int, at: Op) -> None:
    with shape.pipeline() as pipeline:

        def before(op: Op, step: int) -> None:
            if pipeline.rank == at_rank and (op, step) == (at, 1):
                os._exit(1)

        pipeline.before_ops(before)
        for step in range(4):
            pipeline.step(*map(pipeline.own_rows, batch(step)))


@pytest.mark.parametrize(
    ("name", "at_rank", "at", "called"),
    [
        ("2 x 2", 3, "1REDUCE_GRAD.0", r"rank 3 \(replica 1, stage 1\)"),
        ("4 x 1", 2, "0F1", r"rank 2 \(replica 2, stage 0\)"),
        pytest.param("2 x 2", 0, "0B1", r"rank 0 \(replica 0, stage 0\)", marks=pytest.mark.slow),
        pytest.param("4 x 1", 0, "0REDUCE_GRAD.0", r"rank 0 \(replica 0, stage 0\)", marks=pytest.mark.slow),
    ],
)
def test_a_lost_replica_is_named_like_a_lost_stage(name: str, at_rank: int, at: str, called: str) -> None:
    outcomes = run_outcomes(4, loses, name, at_rank, at)
    for outcome in outcomes:
        if outcome.rank == at_rank:
            assert outcome.exit_code == 1
        else:
            assert outcome.value is not None, outcome
            assert re.match(rf"{called} is gone", outcome.value), outcome.value
