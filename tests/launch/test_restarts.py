"""A job that gets nowhere gives up; one that makes progress may start again as often as it likes."""

import pathlib
import socket

import pytest

from pipetrain.launcher.slurm.restarts import FIRST_PORT, NUM_PORTS, Restarts, begin, free_port, main, may_go_on


def save(run: pathlib.Path, step: int) -> None:
    (run / "snapshots" / f"step-{step:08d}").mkdir(parents=True)


def test_only_restarts_without_a_newer_snapshot_count(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    assert begin(run, is_restart=False) == Restarts(0, 0)
    assert begin(run, is_restart=True) == Restarts(0, 1)
    assert begin(run, is_restart=True) == Restarts(0, 2)
    assert may_go_on(run, 3)
    assert not may_go_on(run, 2)
    save(run, 10)
    assert may_go_on(run, 2)
    assert begin(run, is_restart=True) == Restarts(10, 0)
    assert begin(run, is_restart=True) == Restarts(10, 1)
    assert begin(run, is_restart=False) == Restarts(10, 0)  # somebody has submitted it again


def test_half_a_snapshot_and_a_damaged_one_are_no_progress(tmp_path: pathlib.Path) -> None:
    begin(tmp_path, is_restart=False)
    for name in ("step-00000020.partial-1f3a09c2", "step-00000020.damaged"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert begin(tmp_path, is_restart=True) == Restarts(0, 1)


def test_a_lost_record_starts_the_count_anew(tmp_path: pathlib.Path) -> None:
    begin(tmp_path, is_restart=False)
    (tmp_path / "restarts.json").write_text('{"step": ')
    assert begin(tmp_path, is_restart=True) == Restarts(0, 0)


def test_giving_up_says_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 40)
    for count, code in enumerate([0, 0, 0, 1]):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        assert main(["begin", str(tmp_path), "--max=2"]) == code
    assert main(["requeue", str(tmp_path), "--max=2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("2 restarts in a row" in line and "step 40" in line and "cluster.max_restarts" in line for line in lines)


def test_a_requeue_without_slurm_says_what_failed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["requeue", str(tmp_path), "--max=2"]) == 1
    assert "the job cannot start again" in capsys.readouterr().err


def test_a_port_that_is_taken_is_passed_over(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(job for job in range(1000, 9000, 7) if free_port(job, attempts=3) == FIRST_PORT + job)
    with socket.socket() as one, socket.socket() as other:
        for taken, port in ((one, FIRST_PORT + first), (other, FIRST_PORT + first + 1)):
            taken.bind(("", port))
            taken.listen()
        assert free_port(first) >= FIRST_PORT + first + 2
        with pytest.raises(ValueError, match=f"no free port .*{FIRST_PORT + first} on are taken.*ss -ltnp"):
            free_port(first, attempts=2)
    # numbers of jobs grow without end, ports do not
    assert main(["begin", str(tmp_path), "--max=2", f"--port={first + NUM_PORTS}"]) == 0
    assert FIRST_PORT <= int(capsys.readouterr().out) < FIRST_PORT + NUM_PORTS
