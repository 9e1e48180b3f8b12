"""A rank that is stopped or dies in a run of the command line: found in time, told in full, and nobody is left."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from commands import PIPETRAIN, Process, begin, end, listening, wait_until
from ranks import NEVER_SECONDS, PATIENCE_SECONDS
from small_text import make_text

from pipetrain.launcher import launch
from pipetrain.launcher.outcome import FOLDER_VARIABLE, Exit, Outcome, leave

TIMEOUT_SECONDS = 15  # longer than ranks that start on a busy machine wait for each other


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    make_text(folder / "text")
    return folder / "text"


def start(folder: pathlib.Path, text: pathlib.Path, fault: str, timeout_seconds: float, *options: str) -> Process:
    run = ["experiment=smoke", "data=text", f"data.path={text}", "observe.progress=false", "run_dir=run", *options]
    command = [*PIPETRAIN, *run, f"timeout_seconds={timeout_seconds}"]
    return begin(folder, command, PIPETRAIN_FAULTS=fault, TMPDIR=str(folder))


def ranks_of(folder: pathlib.Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("pipetrain-*/process-*")) if file.read_text()]


def state_of(pid: int) -> str:
    """`T`: stopped; `Z` or empty: gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def last_words(process: Process, folder: pathlib.Path, struck: Callable[[], bool]) -> str:
    """What the run says at the end, when the fault has struck. Every rank is gone."""
    wait_until(lambda: len(ranks_of(folder)) > 1, process)
    ranks = ranks_of(folder)
    wait_until(struck, process)
    code, stderr = end(process)
    assert code == Exit.FAILED, stderr
    assert "Traceback" not in stderr
    assert [pid for pid in ranks if state_of(pid) not in ("", "Z")] == []
    return stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    process = start(tmp_path, text, "stop rank=1 op=1F2 step=3", TIMEOUT_SECONDS, "pipeline.num_stages=3")
    stopped = lambda: "T" in [state_of(pid) for pid in ranks_of(tmp_path)]  # noqa: E731
    wait_until(stopped, process)
    addresses = {address for pid in ranks_of(tmp_path) for address, _ in listening(pid)}
    assert addresses <= {"0100007F"}, "ranks of one machine listen at 127.0.0.1 only"
    message = last_words(process, tmp_path, stopped)
    assert f"and nothing came for {TIMEOUT_SECONDS} s (timeout_seconds): that rank hangs, is stopped" in message
    assert "no word from rank 1; rank 0 waits in 0RECV_B" in message
    assert "; rank 2 waits " in message


@pytest.mark.slow
def test_a_dead_rank_ends_the_run(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    process = start(tmp_path, text, "kill rank=1 op=1B1 step=3", NEVER_SECONDS)
    dead = lambda: any(state_of(pid) in ("", "Z") for pid in ranks_of(tmp_path))  # noqa: E731
    message = last_words(process, tmp_path, dead)
    assert re.search(r"rank 1 is gone: rank 0 lost its connection in 0(RECV_B|SEND_F)\d", message)


def test_a_failed_outcome_ends_what_does_not_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped and one that ignores SIGTERM, as soon as the grace is over."""
    monkeypatch.setattr(launch, "REMAINS_SECONDS", 0.2)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    deaf = "import signal, sys; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    started = [
        subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE) for _ in range(2)
    ]
    for rank, process in enumerate(started):
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / f"process-{rank:04d}").write_text(str(process.pid))
    os.kill(started[0].pid, signal.SIGSTOP)
    alarm = threading.Timer(PATIENCE_SECONDS, lambda: [process.kill() for process in started])
    alarm.start()
    with launch.remains_ended(tmp_path):
        leave(Outcome(1, Exit.DONE))
        leave(Outcome(2, Exit.FAILED, "rank 2 failed"))
        assert [process.wait() for process in started] == [-signal.SIGKILL] * 2
    assert alarm.is_alive(), "they were ended by the alarm of this test"
    alarm.cancel()
    for process in started:
        process.stdout.close()


def test_a_run_that_is_stopped_on_request_is_left_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "REMAINS_SECONDS", 0.0)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    (tmp_path / "process-0000").write_text(str(process.pid))
    leave(Outcome(1, Exit.STOPPED))
    looks = threading.Semaphore(0)
    real = launch.collect
    monkeypatch.setattr(launch, "collect", lambda folder: looks.release() or real(folder))
    with launch.remains_ended(tmp_path):
        for _ in range(2):
            assert looks.acquire(timeout=PATIENCE_SECONDS)
    assert process.poll() is None
    process.communicate(b"\n", timeout=PATIENCE_SECONDS)
    assert process.returncode == 0


WAITS = """
import sys, time
from pathlib import Path
from pipetrain.launcher import launch
from pipetrain.launcher.outcome import Exit, Outcome, leave
launch.REMAINS_SECONDS, launch.TORCHRUN_SECONDS = 0.0, 0.1
with launch.remains_ended(Path(sys.argv[1])):
    leave(Outcome(0, Exit.FAILED, "rank 0 waits for rank 1"))
    time.sleep(600)
"""


def test_a_torchrun_that_waits_for_a_store_out_of_reach_is_ended(tmp_path: pathlib.Path) -> None:
    """Its link is cut, and all of its ranks have ended."""
    (tmp_path / "outcomes").mkdir()
    process = begin(tmp_path, [sys.executable, "-c", WAITS, "outcomes"], **{FOLDER_VARIABLE: "outcomes"})
    code, stderr = end(process)
    assert code == Exit.FAILED
    assert stderr == (
        "pipetrain: torchrun waits for its store over a link that seems cut; it has been ended\n"
        "pipetrain: rank 0 waits for rank 1\n"
    )
    assert list(tmp_path.iterdir()) == []
