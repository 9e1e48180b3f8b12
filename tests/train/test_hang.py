"""A rank that is stopped or dies in a run of the command line: found in time, told in full, and nobody is left."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from commands import PIPETRAIN, begin, end, is_alive, listening, wait_until
from ranks import PATIENCE_SECONDS, is_stopped
from small_text import make_text

from pipetrain.launcher import launch
from pipetrain.launcher.outcome import FOLDER_VARIABLE, Exit, Outcome, leave

TIMEOUT_SECONDS = 15  # longer than ranks that start on a busy machine wait for each other


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run(tmp_path: pathlib.Path) -> None:
    run = ["experiment=smoke", *make_text(tmp_path / "text"), "observe.progress=false", "pipeline.num_stages=3"]
    command = [*PIPETRAIN, *run, "run_dir=run", f"timeout_seconds={TIMEOUT_SECONDS}"]
    process = begin(tmp_path, command, PIPETRAIN_FAULTS="stop rank=1 op=1F2 step=3", TMPDIR=str(tmp_path))

    def ranks() -> list[int]:
        return [int(file.read_text()) for file in sorted(tmp_path.glob("pipetrain-*/process-*")) if file.read_text()]

    wait_until(lambda: any(map(is_stopped, ranks())), process)
    started = ranks()
    addresses = {address for pid in started for address, _ in listening(pid)}
    assert addresses <= {"0100007F"}, "ranks of one machine listen at 127.0.0.1 only"
    code, stderr = end(process)
    assert code == Exit.FAILED, stderr
    assert "Traceback" not in stderr
    assert [pid for pid in started if is_alive(pid)] == []
    message = stderr.splitlines()[-1]
    assert f"and nothing came for {TIMEOUT_SECONDS} s (timeout_seconds): that rank hangs, is stopped" in message
    assert "no word from rank 1; rank 0 waits in 0RECV_B" in message
    assert "; rank 2 waits " in message


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
