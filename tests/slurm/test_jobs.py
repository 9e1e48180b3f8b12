"""Training jobs of a real SLURM: started, stopped and put back, losing a node, cancelled, in arrays."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, install, running, wait_for, why_not
from small_text import make_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 120
SCRIPTS = {"LAUNCH": f"{ROOT}/launch", "PYTHON": sys.executable}  # as sbatch starts them
PIPETRAIN = [sys.executable, "-m", "pipetrain.cli", "train"]
# dropout, so that nothing random may be forgotten
RUN = [
    "experiment=smoke", "model.dropout=0.1", "pipeline.num_stages=4", f"steps={STEPS}", "snapshot.every_steps=5",
    "timeout_seconds=60",
]  # fmt: skip
JOB = ["cluster=slurm", "cluster.device=cpu", "cluster.num_nodes=2", "cluster.ranks_per_node=2"]

pytestmark = [
    pytest.mark.slow, pytest.mark.slurm, pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    install()
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The overrides that read it."""
    return make_text(tmp_path_factory.mktemp("data") / "text")


# Two replicas of two stages, a replica on each node, or as many as there are nodes for.
REPLICAS = ["pipeline.num_stages=2", "parallel.num_replicas=auto", "parallel.zero_stage=1", "model.dropout=0"]


@pytest.fixture(scope="module")
def undisturbed(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on this machine, without SLURM."""
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), *text)


def undisturbed_losses(folder: pathlib.Path, *options: str) -> list[float]:
    said_by(folder, *PIPETRAIN, *RUN, *options, "run_dir=run", seconds=200)
    return losses(folder / "run")


def said_by(
    folder: pathlib.Path, *command: str, cluster: Cluster | None = None, seconds: float = 60, **variables: str
) -> str:
    """What a command prints that ends well."""
    given = {**environment(cluster), **variables}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(cluster: Cluster | None = None) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **(cluster.environment if cluster else {})}


def submit(cluster: Cluster, run: pathlib.Path, *options: str) -> str:
    """Submits a run with `pipetrain train cluster=slurm`; returns the job's number."""
    typed = [*PIPETRAIN, *RUN, *JOB, f"run_dir={run}", *options, "--json"]
    return str(json.loads(said_by(run.parent, *typed, cluster=cluster))["job"])


def metrics(run: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of the metrics by now."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(run: pathlib.Path) -> list[float]:
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    return [line["loss"] for line in metrics(run)]


def wait_for_steps(run: pathlib.Path, steps: int) -> float:
    return wait_for(lambda: len(metrics(run)) >= steps, 90, f"the run has not reached step {steps}:\n{log(run)}")


def wait_for_state(cluster: Cluster, job: str, *states: str, seconds: float = 60) -> None:
    wait_for(lambda: state(cluster, job) in states, seconds, f"job {job} is not {states} but {state(cluster, job)}")


def wait_for_the_end(cluster: Cluster, job: str, run: pathlib.Path) -> str:
    """How the job ended. A job that is being put back says FAILED for a moment, but stays in the queue."""
    queued = ["squeue", "--noheader", f"--jobs={job}"]
    wait_for(lambda: not cluster.run(*queued).strip(), 100, f"job {job} has not ended:\n{log(run)}")
    return f"{state(cluster, job)} {field(cluster, job, 'ExitCode')}"


def state(cluster: Cluster, job: str) -> str:
    """PENDING while it waits; the job's processes may still be ending then."""
    return field(cluster, job, "JobState")


def field(cluster: Cluster, job: str, name: str) -> str:
    words = cluster.run("scontrol", "show", "job", job).split()
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


def start_at_once(cluster: Cluster, job: str) -> None:
    """SLURM lets a requeued job wait for some two minutes: long enough for what is left of its last start to end.

    In the second in which it was killed a node refuses it ("Job credential revoked"), and SLURM fails it for that.
    """
    wait_for_state(cluster, job, "PENDING", seconds=60)
    wait_for(lambda: not steps_of(job), 30, f"steps of job {job} are left")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


def steps_of(job: str) -> list[str]:
    """SLURM's own processes on both nodes, one per step."""
    return [command for command in commands() if command.startswith(f"slurmstepd: [{job}.")]


def log(run: pathlib.Path) -> str:
    return "".join(path.read_text() for path in sorted(run.glob("job-*.log")))


def processes_of(run: pathlib.Path) -> list[str]:
    """The command lines of script, launchers and ranks, and of what these have started."""
    return commands(having=f"RUN_DIR={run}\0".encode())


def commands(having: bytes = b"") -> list[str]:
    """The command lines of all processes whose variables have these bytes."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if having in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_usr1_saves_and_puts_back_and_the_run_goes_on_exactly(
    cluster: Cluster, undisturbed: list[float], text: list[str], tmp_path: pathlib.Path
) -> None:
    run = tmp_path / "run"
    job = submit(cluster, run, *text, "snapshot.every_steps=1000")  # so that only the stop can have saved
    wait_for_steps(run, 10)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: f"job {job} waits in the queue again" in log(run), 60, "the job has not put itself back")
    start_at_once(cluster, job)
    saved = max(int(path.name[5:]) for path in (run / "snapshots").glob("step-*"))
    assert saved >= 10
    assert wait_for_the_end(cluster, job, run) == "COMPLETED 0:0", log(run)
    assert losses(run) == undisturbed
    said = log(run)
    assert said.count("stopped by SIGUSR1") == 1, said
    for words in (f"job {job} waits in the queue again", f"going on from {run}/snapshots/step-{saved:08d}"):
        assert words in said
    assert f"step {STEPS}/{STEPS}" in said
    assert "\r" not in said


def test_a_node_that_goes_down_costs_the_steps_since_the_last_snapshot(
    cluster: Cluster, undisturbed: list[float], text: list[str], tmp_path: pathlib.Path
) -> None:
    run = tmp_path / "run"
    job = submit(cluster, run, *text)
    wait_for_steps(run, 20)
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_for_state(cluster, job, "PENDING", seconds=60)
    wait_for(lambda: not processes_of(run), 60, "processes are left")
    if "down" in cluster.run("sinfo", "--noheader", "--nodes=n2", "--format=%t"):  # else it has come back by itself
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    start_at_once(cluster, job)
    assert wait_for_the_end(cluster, job, run) == "COMPLETED 0:0", log(run)
    assert losses(run) == undisturbed
    assert "going on from" in log(run)


def test_replicas_go_on_on_the_node_that_is_left(cluster: Cluster, text: list[str], tmp_path: pathlib.Path) -> None:
    """A node that does not come back takes a replica with it; the batches stay the same, and so do the losses."""
    (tmp_path / "here").mkdir()
    wanted = undisturbed_losses(tmp_path / "here", *text, *REPLICAS, "parallel.num_replicas=2")
    run = tmp_path / "run"
    job = submit(cluster, run, *text, *REPLICAS)
    wait_for_steps(run, 20)
    assert json.loads((run / "plan.json").read_text())["num_replicas"] == 2
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        wait_for_state(cluster, job, "PENDING", seconds=60)
        cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")  # or it comes back by itself
        wait_for(lambda: not processes_of(run), 60, "processes are left")
        cluster.run("scontrol", "update", f"JobId={job}", "NumTasks=1", "NumNodes=1-1")
        start_at_once(cluster, job)
        assert wait_for_the_end(cluster, job, run) == "COMPLETED 0:0", log(run)
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
        wait_for(cluster.is_ready, 30, "the nodes are not idle")
    assert losses(run)[:40] == pytest.approx(wanted[:40], abs=1e-5)
    assert "1 replica, the run had 2" in log(run)
    assert json.loads((run / "plan.json").read_text())["num_replicas"] == 1


def test_scancel_leaves_nothing_behind(cluster: Cluster, text: list[str], tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    job = submit(cluster, run, *text, "steps=100000")
    wait_for_steps(run, 3)
    assert len(processes_of(run)) >= 8  # the script, srun, two launchers, four ranks
    cluster.run("scancel", job)
    seconds = wait_for(lambda: not processes_of(run), 20, "processes are left")
    print(f"\nnothing left {seconds:.1f} s after scancel")
    assert wait_for_the_end(cluster, job, run).startswith("CANCELLED")
    assert "waits in the queue again" not in log(run)


def test_a_job_that_gets_nowhere_gives_up(cluster: Cluster, text: list[str], tmp_path: pathlib.Path) -> None:
    """A run that fails before its first snapshot does so again at each start."""
    run = tmp_path / "run"
    job = submit(cluster, run, *text, "optim.learning_rate=1e30", "optim.max_grad_norm=null", "optim.warmup_steps=0", "snapshot.every_steps=1000", "cluster.max_restarts=1")  # fmt: skip
    again = f"job {job} waits in the queue again"
    wait_for(lambda: again in log(run), 60, "the job has not put itself back")
    start_at_once(cluster, job)
    assert wait_for_the_end(cluster, job, run) == "FAILED 1:0", log(run)
    said = log(run)
    assert said.count(again) == 1, said
    assert "1 restarts in a row made no progress (there is no snapshot yet)" in said, said


def test_an_array_trains_a_line_per_task(cluster: Cluster, text: list[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "sweep.txt").write_text("seed=1 recompute=inline\nseed=2 'optim.betas=[0.9, 0.99]'\n")
    common = [*RUN, *text, "steps=10", "pipeline.num_stages=2"]
    array = ["sbatch", "--parsable", "--array=0-2", f"{ROOT}/launch/slurm_array.sbatch", "sweep.txt"]
    variables = {**SCRIPTS, "RANKS_PER_NODE": "2", "SWEEP_DIR": str(tmp_path)}
    job = said_by(tmp_path, *array, *common, cluster=cluster, **variables).strip()
    wait_for(lambda: not cluster.run("squeue", "--noheader", f"--jobs={job}"), 120, "the array is not done")
    logs = [(tmp_path / f"slurm-{job}_{task}.log").read_text() for task in range(3)]
    for task, line in enumerate(["seed: 1\n", "- 0.99\n"]):
        assert len(metrics(tmp_path / str(task))) == 10, logs[task]
        assert line in (tmp_path / str(task) / "config.yaml").read_text()
    assert "sweep.txt has no line 3 for task 2" in logs[2]


def test_a_mistake_in_the_job_is_not_tried_again(cluster: Cluster, text: list[str], tmp_path: pathlib.Path) -> None:
    """Typed with sbatch, nobody has checked it before."""
    sbatch = ["sbatch", "--parsable", "--nodes=2", f"{ROOT}/launch/slurm.sbatch", *RUN, *text, "pipeline.num_stages=3"]
    job = said_by(tmp_path, *sbatch, cluster=cluster, **SCRIPTS, RUN_DIR=str(tmp_path / "run")).strip()
    assert wait_for_the_end(cluster, job, tmp_path) == "FAILED 2:0"
    assert "make 2 ranks, but pipeline.num_stages=3" in (tmp_path / f"slurm-{job}.log").read_text()


def test_a_sweep_through_submitit_is_a_job_of_slurm_per_run(
    cluster: Cluster, text: list[str], tmp_path: pathlib.Path
) -> None:
    sweep = ["--multirun", "seed=1,2", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep"]
    small = ["experiment=smoke", *text, "steps=5", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=5"]
    said_by(tmp_path, *PIPETRAIN, *sweep, *small, cluster=cluster, seconds=150)
    for number in range(2):
        run = tmp_path / "sweep" / str(number)
        assert len(metrics(run)) == 5
        assert f"seed: {number + 1}\n" in (run / "config.yaml").read_text()
    scripts = list((tmp_path / "sweep" / ".submitit").rglob("[0-9]*_submission.sh"))
    assert len(scripts) == 1  # submitit hands a sweep to sbatch as one array
    assert "#SBATCH --array=0-1" in scripts[0].read_text()
