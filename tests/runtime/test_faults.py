"""Injected faults do what they say, and a run says what happened."""

import os
import pathlib
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_outcomes, run_ranks
from torch import nn

from pipetrain.runtime.failure import PipelineError
from pipetrain.runtime.faults import Deed, Fault, fail_at, inject
from pipetrain.runtime.pipeline import Pipeline


def two_steps(faults: list[Fault], timeout_seconds: float) -> tuple[list[float], float]:
    with Pipeline(
        [lambda: nn.Linear(4, 4)] * 2, nn.functional.mse_loss, num_microbatches=2, timeout_seconds=timeout_seconds
    ) as pipeline:
        inject(pipeline, faults)
        inputs = torch.ones(4, 4)
        pipeline.evaluate(inputs, inputs)  # no fault: it is no step
        start = time.perf_counter()
        losses = [float(pipeline.step(inputs, inputs)) for _ in range(2)]
        return losses, time.perf_counter() - start


def test_a_raised_fault_names_its_op() -> None:
    failed, other = run_outcomes(2, two_steps, [fail_at(0, "0F1", step=1)], 30.0)
    assert "rank 0 failed in 0F1 (compute lane, step 1)" in failed.error
    assert "rank 0 failed in 0F1" in other.error


def test_a_killed_rank_is_named_by_the_other() -> None:
    other, killed = run_outcomes(2, two_steps, [fail_at(1, "1F1", deed=Deed.KILL)], 30.0)
    assert killed.exit_code == -signal.SIGKILL
    assert "rank 1 is gone" in other.error


def stopped_for_a_while(folder: str) -> str | None:
    """Rank 1 stops; rank 0 says what it waits for, and wakes rank 1."""
    path = pathlib.Path(folder) / f"rank-{dist.get_rank()}"
    path.write_text(str(os.getpid()))
    dist.barrier()
    try:
        two_steps([fail_at(1, "1F1", deed=Deed.STOP)], 3.0)
    except PipelineError as error:
        return str(error)
    finally:
        if dist.get_rank() == 0:
            os.kill(int(path.with_name("rank-1").read_text()), signal.SIGCONT)
    return None


def test_a_stopped_rank_is_found_by_its_time_out(tmp_path: pathlib.Path) -> None:
    first = run_outcomes(2, stopped_for_a_while, str(tmp_path))[0]
    assert re.match(
        r"rank 0 waits in 0RECV_B[01] from rank 1, and nothing came for 3 s \(timeout_seconds\)", first.value
    )


def test_a_slow_op_takes_its_time() -> None:
    (plain, _), _ = run_ranks(2, two_steps, [], 30.0)
    (losses, seconds), _ = run_ranks(2, two_steps, [fail_at(1, "1B0", deed=Deed.SLOW, seconds=0.5)], 30.0)
    assert losses == plain
    assert seconds >= 0.5


def test_a_message_is_not_an_op_to_fail_at() -> None:
    with pytest.raises(ValueError, match=r"1SEND_F0: .* such as 1F0"):
        fail_at(1, "1SEND_F0")
