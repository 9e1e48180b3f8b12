"""A run folder is claimed by one run at a time, and never by a run that is dead."""

import errno
import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest
from claims import claim_elsewhere

from pipetrain.monitor import claim
from pipetrain.monitor.claim import LOCK, check_unclaimed, claimed


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_GLANCE_SECONDS", "_DYING_SECONDS", "_LOST_SECONDS"):
        monkeypatch.setattr(claim, name, 0.2)


@pytest.mark.parametrize("again", [False, True])
def test_the_second_run_is_told_who_was_first(tmp_path: Path, again: bool) -> None:
    first = claim_elsewhere(tmp_path)
    told = (
        rf"run_dir={tmp_path}: another run is in this folder \(process {first.pid} on {socket.gethostname()}, since 20"
    )
    with pytest.raises(ValueError, match=told), claimed(tmp_path, again=again):
        pass
    with pytest.raises(ValueError, match=told):
        check_unclaimed(str(tmp_path), again=again)
    first.communicate("end\n")
    with claimed(tmp_path, again=again):
        pass


def test_a_run_that_was_killed_blocks_nobody(tmp_path: Path) -> None:
    first = claim_elsewhere(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (tmp_path / LOCK).is_file()
    check_unclaimed(str(tmp_path), again=False)
    with claimed(tmp_path, again=False):
        assert f'"pid": {os.getpid()},' in (tmp_path / LOCK).read_text()


def test_whoever_goes_on_waits_until_the_killed_run_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_DYING_SECONDS", 100.0)
    monkeypatch.setattr(claim, "_GLANCE_SECONDS", -1.0)
    first = claim_elsewhere(tmp_path)
    monkeypatch.setattr(claim.time, "sleep", lambda _: first.communicate("end\n") if first.returncode is None else None)
    with claimed(tmp_path, again=True):
        assert first.returncode == 0


def test_nothing_is_left_of_a_run_that_has_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyError), claimed(tmp_path, again=False):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    check_unclaimed(str(tmp_path), again=False)
    check_unclaimed(str(tmp_path / "new"), again=False)
    check_unclaimed(None, again=False)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_file_that_is_gone_is_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before removes its file after this one has opened it: a third would lock another file."""
    lockf, removed = fcntl.lockf, []

    def lock_after_the_end_of_the_run_before(*arguments: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        lockf(*arguments)

    monkeypatch.setattr(claim.fcntl, "lockf", lock_after_the_end_of_the_run_before)
    with claimed(tmp_path, again=False):
        assert (tmp_path / LOCK).is_file()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lockf(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claim.fcntl, "lockf", lockf)
    with claimed(tmp_path, again=False):
        assert "knows no locks: start no other run there" in capsys.readouterr().err
        with pytest.raises(ValueError, match=f"if that run has ended remove {tmp_path / LOCK}"):
            check_unclaimed(str(tmp_path), again=False)
        check_unclaimed(str(tmp_path), again=True)
