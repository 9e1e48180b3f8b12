"""A rank that is gone, or hangs, while another one waits for its device: an event that never happens tells nobody which.

Real processes; the device of each is one whose host runs ahead, and the last rank's does not come to the end of the second step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late_device import LateDevice
from parity_cases import mean_square, rows
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, run_outcomes, run_ranks, time_out_once
from test_failures import last_line
from torch import nn

from pipetrain.comm.device import fetch
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError, Watchdog
from pipetrain.comm.lanes import Lanes
from pipetrain.plan.plan import make_plan
from pipetrain.runtime import pipeline as runtime
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Kind, Op

M = 4
LOSS = "the loss of the step"


class Stuck(LateDevice):
    """Never comes to the loss of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.sits = threading.Event()

    def waited(self, what: str) -> None:
        self.asked += what == LOSS
        if self.asked == 2:
            self.sits.set()

    def has_ended(self, event: Any) -> bool:
        return not self.sits.is_set() and super().has_ended(event)


def beside_a_device_that_is_stuck(path: str, at_rank: int, how: str) -> None:
    """Train two steps; `at_rank` is killed, or hangs, in its last B of the second one, when the last rank sits in its device."""
    rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(path)
    device = Stuck() if rank == ranks - 1 else LateDevice()
    runtime.make_lanes = lambda rank, _: Lanes(rank, device)  # type: ignore[assignment]
    if how == "hangs":
        time_out_once((folder / "sits").exists)
    torch.manual_seed(0)
    plan = make_plan(ranks, num_ranks=ranks, num_microbatches=M, edges="pinned")
    layers = [nn.Linear(8, 8) for _ in range(ranks)]
    pipeline = Pipeline(layers, mean_square, plan=plan, timeout_seconds=NEVER_SECONDS)

    def before(op: Op, step: int) -> None:
        if step == 1 and op == Op(at_rank, Kind.B, M - 1):
            while not (folder / "sits").exists():
                time.sleep(0.01)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            while not all((folder / f"ended-{other}").exists() for other in range(ranks) if other != at_rank):
                time.sleep(0.01)
            os._exit(1)

    if rank == at_rank:
        pipeline.before_ops(before)
    if isinstance(device, Stuck):
        threading.Thread(target=lambda: device.sits.wait() and (folder / "sits").touch(), daemon=True).start()
    try:
        for inputs, targets in rows(8, 8):
            pipeline.step(inputs, targets)
    finally:
        (folder / f"ended-{rank}").touch()


def test_a_rank_that_is_killed_is_named_by_a_rank_that_waits_for_its_device(tmp_path: Path) -> None:
    outcomes = run_outcomes(3, beside_a_device_that_is_stuck, str(tmp_path), 1, "killed")
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert "rank 1 is gone: rank 0 lost its connection" in last_line(outcome, "PipelineError")
    assert f"rank 2 ends; rank 2 waits for its device to give {LOSS}" in last_line(outcomes[2], "PipelineError")


def test_a_rank_that_hangs_is_named_by_a_rank_that_waits_for_its_device(tmp_path: Path) -> None:
    outcomes = run_outcomes(3, beside_a_device_that_is_stuck, str(tmp_path), 0, "hangs")
    assert outcomes[0].exit_code == 1
    assert "no word from rank 0;" in last_line(outcomes[2], "PipelineError")


def test_of_two_ranks_one_is_killed(tmp_path: Path) -> None:
    """Nobody is left to notice: the one that waits for its device finds out by its time-out."""
    outcomes = run_outcomes(2, time_out_after_a_kill, str(tmp_path))
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert "no word from rank 0;" in last_line(outcomes[1], "PipelineError")


def time_out_after_a_kill(path: str) -> None:
    if dist.get_rank() == 1:
        time_out_once((Path(path) / "sits").exists)
    beside_a_device_that_is_stuck(path, 0, "killed")


# A host that sits in a launch ------------------------------------------------------------------------------------------


def sits_in_a_launch(path: str) -> str | None:
    """Rank 1 sits where no monitor is, until its connections are broken; rank 0 fails."""
    rank, folder = dist.get_rank(), Path(path)
    runtime.make_lanes = lambda rank, _: Lanes(rank, LateDevice())  # type: ignore[assignment]
    plan = make_plan(2, num_ranks=2, num_microbatches=M, edges="pinned")
    pipeline = Pipeline([nn.Linear(8, 8) for _ in range(2)], mean_square, plan=plan, timeout_seconds=NEVER_SECONDS)
    broken = threading.Event()
    abort = pipeline._runner.transport.abort

    def break_off() -> None:
        abort()
        broken.set()

    pipeline._runner.transport.abort = break_off  # type: ignore[method-assign]

    def before(op: Op, step: int) -> None:
        if rank == 1 and op == Op(1, Kind.F, 2):
            (folder / "sits").touch()
            broken.wait()
            raise RuntimeError("NCCL communicator was aborted")
        if rank == 0 and op.kind is Kind.B:
            while not (folder / "sits").exists():
                time.sleep(0.01)
            raise KeyError("broken on purpose")

    pipeline.before_ops(before)
    (batch,) = rows(8)
    try:
        pipeline.step(*batch)
    except (PipelineError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_a_rank_whose_host_sits_in_a_launch_is_told(tmp_path: Path) -> None:
    first, second = run_ranks(2, sits_in_a_launch, str(tmp_path))
    assert first == "KeyError: 'broken on purpose'"
    assert second.startswith("PipelineError: rank 0 failed in 0B0 (compute lane, step 1): KeyError"), second


def test_the_watchdog_gives_up_a_host_that_comes_no_further() -> None:
    """All ranks may sit in launches: then no wait has a time-out, and nobody fails."""
    failed = threading.Event()
    monitor = Monitor(3, FailureBoard(None), timeout_seconds=0.05)
    monitor.on_failure = failed.set
    monitor.doing = "3F1"
    watchdog = Watchdog(monitor, look_seconds=0.01)
    assert failed.wait(PATIENCE_SECONDS)
    watchdog.close()
    assert monitor.failure is not None
    assert monitor.failure.startswith("rank 3 is in 3F1 and came no further for 0.05 s (timeout_seconds)")


def test_the_watchdog_leaves_alone_who_waits_or_comes_further() -> None:
    monitor = Monitor(0, FailureBoard(None), timeout_seconds=0.0)
    looks = threading.Semaphore(0)
    monitor.look = looks.release  # type: ignore[method-assign]
    monitor.is_waiting, monitor.doing = True, "0F0"
    watchdog = Watchdog(monitor, look_seconds=0.001)
    for _ in range(20):
        assert looks.acquire(timeout=PATIENCE_SECONDS)
    monitor.doing, monitor.is_waiting = None, False
    for _ in range(20):
        assert looks.acquire(timeout=PATIENCE_SECONDS)
    watchdog.close()
    assert monitor.failure is None


def test_what_the_device_gives_after_a_failure_is_refused() -> None:
    """Connections were broken under it: its messages are not what was sent."""
    monitor = Monitor(0, FailureBoard(None), timeout_seconds=NEVER_SECONDS)
    monitor.fail("rank 1 failed in 1F0")
    with pytest.raises(PipelineError, match=r"rank 1 failed in 1F0 .*waits for its device to give the loss"):
        fetch(torch.ones(3, dtype=torch.float64), "the loss", LateDevice(), monitor)
