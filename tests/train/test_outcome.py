"""How ranks tell the launcher what happened, and what it makes of that."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

from pipetrain import train
from pipetrain.launcher.launch import sum_up
from pipetrain.launcher.outcome import (
    FOLDER_VARIABLE,
    SIGNALS,
    Exit,
    Outcome,
    StopRequest,
    announce,
    announce_run_dir,
    collect,
    end,
    processes,
    run_dir_of,
    tell,
)
from pipetrain.runtime import call_programs

STOPPED = "stopped by SIGINT"

KILLED = "rank 1 was killed by SIGKILL"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_stopped_run_is_75_though_torchrun_must_not_see_it(folder: Path) -> None:
    assert end(Outcome(1, Exit.STOPPED, STOPPED)) == Exit.DONE  # else torchrun would end rank 0, which still writes
    assert end(Outcome(0, Exit.STOPPED, STOPPED, "runs/x")) == Exit.DONE
    announce_run_dir("runs/x")
    assert sum_up(collect(folder), "", run_dir_of(folder)) == Outcome(1, Exit.STOPPED, STOPPED, "runs/x")


def test_the_first_failure_is_the_one_that_is_told(folder: Path) -> None:
    end(Outcome(0, Exit.STOPPED, STOPPED, "runs/x"))
    assert end(Outcome(2, Exit.FAILED, "rank 2 failed in 2F0")) == Exit.FAILED
    assert end(Outcome(1, Exit.FAILED, "rank 1 ends because of it")) == Exit.FAILED
    assert sum_up(collect(folder), KILLED, "runs/x") == Outcome(2, Exit.FAILED, "rank 2 failed in 2F0", "runs/x")


def test_a_rank_that_raised_goes_before_those_that_waited_for_it(folder: Path) -> None:
    end(Outcome(0, Exit.FAILED, "rank 0 waited for rank 1", waited=True))
    end(Outcome(1, Exit.WRONG_INPUT, "a wrong loss"))
    assert sum_up(collect(folder), "", None) == Outcome(1, Exit.WRONG_INPUT, "a wrong loss")


def test_a_rank_that_raised_is_not_ended_before_it_has_said_so() -> None:
    """Those that waited for it have failed by then, for which torch sends SIGTERM to the others."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        signal.signal(signal.SIGTERM, lambda *_: pytest.fail("ended before it has said so"))
        with pytest.raises(ValueError, match="a wrong loss"), StopRequest():
            raise ValueError("a wrong loss")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_a_killed_rank_leaves_nothing_and_is_told_all_the_same(folder: Path) -> None:
    assert sum_up(collect(folder), KILLED, run_dir_of(folder)).message == KILLED
    assert sum_up(collect(folder), "", None).code == Exit.FAILED


def test_processes_are_announced(folder: Path) -> None:
    for rank in (0, 1):
        announce(rank)
    assert len(processes(folder)) == 2


def test_without_a_launcher_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert end(Outcome(0, Exit.STOPPED, STOPPED, "runs/x")) == Exit.STOPPED
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "run folder: runs/x"
    assert captured.err == f"pipetrain: {STOPPED}\n"
    assert end(Outcome(1, Exit.WRONG_INPUT, "the same mistake on every rank")) == Exit.WRONG_INPUT
    assert capsys.readouterr().err == ""


def test_quiet_keeps_stdout_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    tell(Outcome(0, Exit.DONE, "", "runs/x"), quiet=True)
    assert capsys.readouterr().out == ""


def test_what_the_library_warns_of_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What others warn of keeps its place in their code."""
    with warnings.catch_warnings(record=True) as others, train._warnings_as_lines():
        warnings.simplefilter("always")
        warnings.warn_explicit("recompute.sets=50: more than needed", UserWarning, str(call_programs.__file__), 1)
        warnings.warn_explicit("of torch", UserWarning, str(torch.__file__), 1)
    assert capsys.readouterr().err == "pipetrain: recompute.sets=50: more than needed\n"
    assert [str(other.message) for other in others] == ["of torch"]
