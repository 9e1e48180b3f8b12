"""A request to stop, as one process sees it."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import is_alive
from ranks import NEVER_SECONDS, PATIENCE_SECONDS

from pipetrain.launcher.outcome import StopRequest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_kept_until_somebody_asks(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.signum == 0
        os.kill(os.getpid(), signum)
        os.kill(os.getpid(), signum)  # torchrun's copy of a Ctrl-C of the terminal: still one request
        assert stop.signum == signum
    assert signal.getsignal(signum) is before


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    clock = iter([100.0, 100.5, 102.0])
    monkeypatch.setattr("pipetrain.launcher.outcome.time.monotonic", lambda: next(clock))
    with StopRequest():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_launcher_that_is_gone_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.signum == signal.SIGHUP


LAUNCHER = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-m", "pipetrain.train", *sys.argv[1:]], env={**os.environ, "PIPETRAIN_LAUNCHER": str(os.getpid())})
print(rank.pid, flush=True)
rank.wait()
"""


@pytest.mark.slow
def test_a_rank_that_looks_for_the_others_ends_with_its_launcher(tmp_path: pathlib.Path) -> None:
    """The store that it waits for died with torchrun."""
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        root = str(pathlib.Path(__file__).resolve().parents[2])
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "experiment=smoke", f"timeout_seconds={NEVER_SECONDS}"],
            cwd=tmp_path,
            env={**os.environ, **ranks, **place, "PYTHONPATH": root, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        try:
            assert is_alive(rank)
            launcher.kill()
            launcher.wait()
            launcher.stdout.close()
            deadline = time.monotonic() + PATIENCE_SECONDS  # it may still be loading torch
            while is_alive(rank) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not is_alive(rank)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
