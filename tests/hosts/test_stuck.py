"""A torchrun that does not look at its ranks any more is ended; one that only waits for another of them is not."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from ranks import PATIENCE_SECONDS

from pipetrain.launcher import stuck

# A stand-in for torchrun's part: it starts two processes and does not ask after them until it reads a line.
LAUNCHER = """
import subprocess, sys
first = subprocess.Popen(["true"])
other = subprocess.Popen(["sleep", sys.argv[1]])
print(first.pid, other.pid, flush=True)
sys.stdin.readline()
first.wait()
print("seen", flush=True)
sys.stdin.readline()
"""


def start(seconds_of_the_other: str) -> tuple[subprocess.Popen[str], int, int]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, seconds_of_the_other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank, other = map(int, launcher.stdout.readline().split())
    return launcher, rank, other


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck, "_PATIENCE_SECONDS", 0.3)


def test_one_that_does_not_look_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    launcher, rank, _ = start("0")
    with launcher:
        stuck.main(launcher.pid, rank, "why it failed")
        assert launcher.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    first, last = capfd.readouterr().err.splitlines()
    assert f"torchrun (process {launcher.pid}) waits for its store over a link that seems cut" in first
    assert last == "pipetrain: why it failed"


def test_one_that_waits_for_another_rank_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    launcher, rank, other = start("600")
    with launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        watching = threading.Thread(target=stuck.main, args=(launcher.pid, rank))
        watching.start()
        watching.join(1.0)  # three times as long as it would have patience
        assert watching.is_alive()
        assert launcher.poll() is None
        launcher.stdin.write("look\n")
        launcher.stdin.flush()
        assert launcher.stdout.readline() == "seen\n"
        watching.join(PATIENCE_SECONDS)
        assert not watching.is_alive()
        os.kill(other, signal.SIGKILL)
        launcher.kill()
    assert capfd.readouterr().err == ""


def test_alone_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: pytest.fail("a process was started"))
    stuck.watch_torchrun("")
