"""Sweeps by real Hydra, with its own launcher and with submitit's local one."""

import json
import os
import pathlib
import re
import signal
import subprocess
from typing import Any

import pytest
from commands import PIPETRAIN, begin, complete, wait_until
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from ranks import PATIENCE_SECONDS
from resumed import num_steps_of
from small_text import make_text

from pipetrain.cli.main import main
from pipetrain.cli.multirun import expand

SWEEP = [*PIPETRAIN, "--multirun"]
TINY = ["experiment=smoke", "data=text", "data.path=text", "observe.progress=false", "steps=3"]
ALONE = ["pipeline.num_stages=1", "recompute=never"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    make_text(tmp_path / "text")
    return tmp_path


def run(folder: pathlib.Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return complete(folder, [*SWEEP, *TINY, *options])


def config_of(run_dir: str) -> str:
    return (pathlib.Path(run_dir) / "config.yaml").read_text()


def sweep_folder(stdout: str) -> pathlib.Path:
    return pathlib.Path(stdout.splitlines()[-1].removeprefix("sweep folder: "))


def jobs_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((folder / "jobs").glob("*.json"))]


@pytest.mark.slow
def test_each_job_has_a_run_folder_that_its_ranks_share(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks per job; then the report of the sweep folder compares them."""
    done = run(folder, "seed=1,2")
    assert done.returncode == 0, done.stderr
    sweep = sweep_folder(done.stdout)
    assert sweep.name.endswith("-smoke-sweep")
    jobs = jobs_of(sweep)
    assert [(job["run_dir"], job["code"]) for job in jobs] == [(str(sweep / "0"), 0), (str(sweep / "1"), 0)]
    for number, job in enumerate(jobs):
        events = pathlib.Path(job["run_dir"]) / "events"
        assert [file.name for file in sorted(events.iterdir())] == ["rank-0000.jsonl", "rank-0001.jsonl"]
        assert f"seed: {number + 1}\n" in config_of(job["run_dir"])
    assert main(["report", str(sweep), "--json"]) == 0
    assert [value["differs"] for value in json.loads(capsys.readouterr().out)] == [{"seed": 1}, {"seed": 2}]


@pytest.mark.slow
def test_a_job_that_fails_is_named_and_the_others_are_run(folder: pathlib.Path) -> None:
    """It fails when it runs: its loss becomes infinite in the second step."""
    done = run(folder, *ALONE, "optim.warmup_steps=0", "optim.max_grad_norm=null", "optim.learning_rate=1e38,1e-3")
    assert done.returncode == 1, done.stderr
    jobs = jobs_of(sweep_folder(done.stdout))
    assert [job["code"] for job in jobs] == [1, 0]
    assert re.match(
        r"pipetrain: job 0 \(.*optim.learning_rate=1e\+?38.*ended with exit code 1", done.stderr.splitlines()[-1]
    )
    assert (pathlib.Path(jobs[1]["run_dir"]) / "report.json").is_file()


@pytest.mark.slow
def test_jobs_under_submitit_are_stopped_and_killed_one_by_one(folder: pathlib.Path) -> None:
    """In folders of a template. One is asked to stop; of another the process that Hydra waits for is killed: that one is named, and the
    others are whole."""
    submitit = ["hydra/launcher=submitit_local", "hydra.sweep.dir=sweep", "run_dir=mine/${steps}-of-${seed}"]
    process = begin(folder, [*SWEEP, *TINY, *ALONE, "steps=100000,3", "seed=1,2", *submitit])
    runs = [folder / "mine" / f"100000-of-{seed}" for seed in (1, 2)]
    wait_until(lambda: all(num_steps_of(run) >= 1 for run in runs), process)
    asked, killed = map(launcher_of, runs)
    os.kill(asked, signal.SIGTERM)
    os.kill(parent_of(killed), signal.SIGKILL)
    os.kill(killed, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, stderr
    assert sweep_folder(stdout) == folder / "sweep"
    assert [job["code"] for job in jobs_of(folder / "sweep")] == [75, None, 0, 0]
    assert re.match(r"pipetrain: job 1 \(.*did not say how it ended", stderr.splitlines()[-1])
    for seed in (1, 2):
        assert f"seed: {seed}\n" in config_of(str(folder / "mine" / f"3-of-{seed}"))
        assert num_steps_of(folder / "mine" / f"3-of-{seed}") == 3


def parent_of(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])


def launcher_of(run_dir: pathlib.Path) -> int:
    """The process of `pipetrain train` for this run folder."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "pipetrain.cli" in words and any(word.startswith("run_dir=") and run_dir.name in word for word in words):
            return int(path.parent.name)
    raise AssertionError(f"no process runs {run_dir}")


@pytest.mark.slow
def test_a_request_to_stop_reaches_the_job_that_runs_and_no_other_starts(folder: pathlib.Path) -> None:
    options = [*ALONE, "seed=1,2", "steps=100000", "hydra.sweep.dir=sweep"]
    process = begin(folder, [*SWEEP, *TINY, *options])
    wait_until(lambda: num_steps_of(folder / "sweep" / "0") >= 1, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, stderr
    assert [job["code"] for job in jobs_of(sweep_folder(stdout))] == [75]
    assert "pipetrain: job 1 (" in stderr
    assert "was not started" in stderr


def test_jobs_are_those_that_hydras_sweeper_makes() -> None:
    """They are expanded here by Hydra's public parser; its sweeper, which runs them, is not public."""
    listed = ["seed=1,2", "steps=range(1,4)", "pipeline.balance=[2,4],[3,3]", "optim.learning_rate=choice(1e-3,1e-2)"]
    overrides = [*listed, "data=text", "data.path='a b'", "seed=3,4"]
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    assert len(batch) == 24
    assert [(job.number, list(job.overrides)) for job in expand(overrides)] == list(enumerate(batch))


MISTAKES = {
    "value": (["seed=1,2", "recompute.mode=inline,inlin"], ["job 1 (seed=1 recompute.mode=inlin)", "'inline'"]),
    "key": (["sed=1,2"], ["job 0 (sed=1)", "'seed'"]),
    "folder": (["seed=1,2", "run_dir=mine"], ["run_dir=mine: jobs 0 and 1 would share it", "${seed}"]),
    "launcher": (["seed=1,2", "hydra/launcher=submitit_slum"], ["hydra/launcher=submitit_slum", "submitit_local"]),
    "code": (["seed=1,2", "hydra.launcher._target_=os.system"], ["hydra.launcher._target_", "no code"]),
    "code in a value": (["seed=1,2", "+hydra.launcher.x={_target_: os.system}"], ["_target_", "no code"]),
    "code of a sweeper": (["seed=1,2", "hydra.sweeper._target_=os.system"], ["hydra.sweeper._target_", "no code"]),
    "another key of Hydra": (["seed=1,2", "+hydra.callbacks.a=b"], ["hydra.callbacks.a=b", "hydra.launcher.NAME"]),
    "an interval": (["optim.learning_rate=interval(0,1)"], ["optim.learning_rate=interval(0,1)", "write them down"]),
    "unreadable": (["seed=1,2", "data.path=/a b=c"], ["data.path=/a b=c"]),
}


@pytest.mark.quick("value", "key", "folder", "an interval", "unreadable")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_any_job_ends_with_2_before_one_starts(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options, words = MISTAKES[name]
    assert main(["train", "--multirun", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert [word for word in words if word not in line] == [], line
    assert list(tmp_path.iterdir()) == []
