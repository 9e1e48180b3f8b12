"""A request to stop, as one process sees it."""

import os
import signal
import subprocess
import sys

import pytest

from pipetrain.engine.stop import StopRequest


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
    monkeypatch.setattr("pipetrain.engine.stop.time.monotonic", lambda: next(clock))
    with StopRequest():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_launcher_that_is_gone_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.signum == signal.SIGHUP


def test_importing_the_handlers_needs_no_torch() -> None:
    program = "import sys, pipetrain.engine.stop, pipetrain.engine.outcome, pipetrain.engine.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
