"""A rank of one of several replicas that dies, raises or hangs: every survivor ends and names it, with its replica and stage."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import mean_square, rows
from ranks import NEVER_SECONDS, Outcome, run_outcomes, time_out_once
from test_failures import Harmful, assert_gone, block_it, last_line
from torch import nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.faults import faults_in, inject
from pipetrain.runtime.pipeline import Pipeline

M = 3
NAMES = {
    "replica-stage": [f"rank {rank} (replica {rank // 2}, stage {rank % 2})" for rank in range(4)],
    "stage-replica": [f"rank {rank} (replica {rank % 2}, stage {rank // 2})" for rank in range(4)],
    "replicas alone": [f"rank {rank} (replica {rank}, stage 0)" for rank in range(4)],
}


def pipeline_of(layers: list[nn.Module], order: str, timeout_seconds: float = NEVER_SECONDS) -> Pipeline:
    """Two replicas of two stages, or four of one."""
    grid: dict[str, Any] = {"num_stages": 1, "num_replicas": 4}
    if order != "replicas alone":
        grid = {"num_stages": 2, "num_replicas": 2, "order": order}
    plan = make_plan(2, num_microbatches=M, **grid)
    return Pipeline(layers, mean_square, plan=plan, timeout_seconds=timeout_seconds)


def train(order: str, at_rank: int, op: str, deed: str) -> None:
    """In the second step something happens to a rank."""
    torch.manual_seed(0)
    pipeline = pipeline_of([nn.Linear(8, 8), nn.Linear(8, 8)], order)
    inject(pipeline, faults_in(f"{deed} rank={at_rank} op={op} step=2"))
    for inputs, targets in rows(12, 12, 12):
        pipeline.step(*pipeline.own_rows((inputs, targets)))
    pipeline.close()


def named_by_all(outcomes: list[Outcome], lost: int, says: str) -> None:
    assert_gone(outcomes)
    for outcome in outcomes:
        if outcome.rank != lost:
            assert outcome.exit_code == 1
            message = last_line(outcome, "PipelineError")
            assert says in message, f"rank {outcome.rank}: {message}"


# Each coordinate; in a forward, a backward, before gradients are added up and while the other replica does so.
@pytest.mark.parametrize(
    ("order", "lost", "op"),
    [
        ("replica-stage", 1, "1B0"),
        ("stage-replica", 1, "0REDUCE_GRAD.0"),
        ("replicas alone", 2, "0F1"),
        ("replica-stage", 0, "0F1"),
        ("replica-stage", 3, "1REDUCE_GRAD.0"),
        ("replicas alone", 0, "0REDUCE_GRAD.0"),
    ],
)
def test_a_rank_that_is_killed_is_named_by_every_survivor(order: str, lost: int, op: str) -> None:
    outcomes = run_outcomes(4, train, order, lost, op, "kill")
    assert outcomes[lost].exit_code == -signal.SIGKILL
    named_by_all(outcomes, lost, f"{NAMES[order][lost]} is gone")


def test_a_rank_that_raises_is_named_in_the_other_replica() -> None:
    outcomes = run_outcomes(4, train, "replica-stage", 3, "1B1", "raise")
    assert outcomes[3].error is not None
    assert "a fault was injected at 1B1" in outcomes[3].error
    named_by_all(outcomes, 3, "rank 3 (replica 1, stage 1) failed in 1B1 (compute lane, step 2)")


def beside_one_that_hangs(path: str, hung: int) -> None:
    folder, rank = Path(path), dist.get_rank()
    time_out_once((folder / "blocked").exists)
    torch.manual_seed(0)
    harm: Any = partial(block_it, folder, {0, 1, 2, 3} - {hung})
    layers: list[nn.Module] = [Harmful(harm, backward=2 if rank == hung else 0) for _ in range(2)]
    pipeline = pipeline_of(layers, "replica-stage", timeout_seconds=30.0)
    try:
        for inputs, targets in rows(12, 12):
            pipeline.step(*pipeline.own_rows((inputs, targets)))
    finally:
        (folder / f"ended-{rank}").touch()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_its_silence(tmp_path: Path) -> None:
    outcomes = run_outcomes(4, beside_one_that_hangs, str(tmp_path), 3)
    assert_gone(outcomes)
    for outcome in outcomes[:3]:
        assert outcome.exit_code == 1
        message = last_line(outcome, "PipelineError")
        assert "and nothing came for 30 s" in message
        # On a busy machine another rank may be late with its word, too.
        assert re.search(r"no word from rank (\d \([^)]*\), )*3 \(replica 1, stage 1\)[,;]", message), message
