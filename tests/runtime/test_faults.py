"""Injected faults do what they say, and a run says what happened."""

import os
import pathlib
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from damage import fill_disk
from ranks import NEVER_SECONDS, is_stopped, run_outcomes, run_ranks, time_out_once
from torch import nn

from pipetrain.comm.failure import PipelineError
from pipetrain.runtime import faults as fault_module
from pipetrain.runtime.faults import VARIABLE, Deed, Fault, faults_in, faults_of_environment, inject
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Op


def two_steps(faults: str, timeout_seconds: float) -> tuple[list[float], list[float]]:
    """The losses, and the seconds that the faults slept, none of which is slept here."""
    slept: list[float] = []
    fault_module.time = SimpleNamespace(sleep=slept.append)  # type: ignore[assignment]
    with Pipeline(
        [lambda: nn.Linear(4, 4)] * 2, nn.functional.mse_loss, num_microbatches=2, timeout_seconds=timeout_seconds
    ) as pipeline:
        inject(pipeline, faults_in(faults))
        inputs = torch.ones(4, 4)
        pipeline.evaluate(inputs, inputs)  # no fault: it is no step
        return [float(pipeline.step(inputs, inputs)) for _ in range(2)], slept


def stopped_for_a_while(folder: str) -> str | None:
    """Rank 1 stops; rank 0 says what it waits for, and wakes rank 1."""
    path = pathlib.Path(folder) / f"rank-{dist.get_rank()}"
    path.write_text(str(os.getpid()))
    dist.barrier()
    other = int(path.with_name("rank-1").read_text())
    time_out_once(lambda: is_stopped(other))
    try:
        two_steps("stop rank=1 op=1F1 step=1", 30.0)
    except PipelineError as error:
        return str(error)
    finally:
        if dist.get_rank() == 0:
            os.kill(other, signal.SIGCONT)
    return None


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_its_time_out(tmp_path: pathlib.Path) -> None:
    first = run_outcomes(2, stopped_for_a_while, str(tmp_path))[0]
    assert re.match(
        r"rank 0 waits in 0RECV_B[01] from rank 1, and nothing came for 30 s \(timeout_seconds\)", first.value
    )


def test_slow_ops_take_their_time() -> None:
    """One op; or from a step on each of the six of a step (F, R and B of two microbatches)."""
    (plain, _), _ = run_ranks(2, two_steps, "", NEVER_SECONDS)
    found = run_ranks(
        2, two_steps, "slow rank=1 op=1B0 step=1 seconds=0.5; slow rank=0 step=1 num_steps=2 seconds=0.1", NEVER_SECONDS
    )
    assert found == [(plain, [0.1] * 2 * 6), (plain, [0.5])]


def test_a_message_fails_as_it_is_started() -> None:
    failed, other = run_outcomes(2, two_steps, "raise rank=1 op=1SEND_B0 step=1", NEVER_SECONDS)
    assert "a fault was injected at 1SEND_B0 of rank 1 in step 1, counted from 1" in failed.error
    assert "a fault was injected at 1SEND_B0 of rank 1 in step 1, counted from 1" in other.error


@pytest.mark.parametrize("op", ["0SEND_F1", "0F0"])
def test_a_dropped_connection_is_told_at_both_ends(op: str) -> None:
    outcomes = run_outcomes(2, two_steps, f"drop rank=0 op={op} step=2", NEVER_SECONDS)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert re.search(r"rank \d is gone: rank \d lost its connection in \d(SEND|RECV)_[FB]\d", outcome.error)


def num_sockets() -> int:
    return sum(
        os.readlink(path).startswith("socket:") for path in pathlib.Path("/proc/self/fd").iterdir() if path.exists()
    )


def sockets_after_a_drop() -> tuple[int, int]:
    """Sockets of rank 0 before and after one connection is dropped; rank 1 does nothing but hold the other end."""
    with Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, timeout_seconds=NEVER_SECONDS
    ) as pipeline:
        dist.barrier()
        before = after = num_sockets()
        if pipeline.rank == 0:
            pipeline.disconnect(Op.parse("0SEND_F0"))
            while after == before:
                after = num_sockets()
        dist.barrier()
    return before, after


def test_a_dropped_connection_is_a_closed_socket() -> None:
    (before, after), _ = run_ranks(2, sockets_after_a_drop)
    assert after == before - 1


def test_faults_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "kill rank=1 op=1F2 step=3; slow rank=0 step=2 num_steps=5 seconds=0.1;")
    assert faults_of_environment() == [Fault(1, 2, Op.parse("1F2"), Deed.KILL), Fault(0, 1, None, Deed.SLOW, 0.1, 5)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert faults_of_environment() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil rank=1 op=1F2 step=3", "there is no 'kil'; allowed are raise, kill, stop, slow, drop"),
        ("kill op=1F2 step=3", "rank"),
        ("kill rank=one op=1F2 step=3", "'one'"),
        ("kill rank=1 op=F2 step=3", "F2"),
        ("kill rank=1 op=1F2 steps=3", "there is no steps"),
    ],
)
def test_faults_that_cannot_be_read(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=words) as caught:
        faults_of_environment()
    assert "write DEED rank=R op=OP step=S" in str(caught.value)


def test_only_a_small_disk_is_filled(tmp_path: pathlib.Path) -> None:
    if shutil.disk_usage(tmp_path).free <= 256 << 20:
        pytest.skip("the disk of the temporary folder is a small one")
    with pytest.raises(ValueError, match="only a small one of its own may be filled"):
        fill_disk(tmp_path)
