"""The job that `cluster=slurm` writes, and what is refused before one is."""

import json
import pathlib
import shlex
import subprocess
import sysconfig

import pytest

from pipetrain.cli.main import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = [
    "train", "cluster=slurm", "cluster.num_nodes=2", "cluster.ranks_per_node=2", "pipeline.num_stages=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    assert main([*JOB, *overrides, "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_slurm_is_asked_for(capsys: pytest.CaptureFixture[str], empty_folder: pathlib.Path) -> None:
    lines = dry_run(
        capsys, "cluster.time_limit=12:00:00", "cluster.partition=long", "cluster.account=me", "cluster.cpus_per_rank=3",
        'cluster.options=["--qos=high","--exclusive"]', "run_dir=mine",
    )  # fmt: skip
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert asked == {
        "--job-name=quickstart", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--gres=gpu:2",
        "--time=12:00:00", "--partition=long", "--account=me", "--qos=high", "--exclusive", "--signal=B:USR1@120",
        "--requeue", "--open-mode=append", f"--output={empty_folder}/mine/job-%j.log",
    }  # fmt: skip
    assert f"export RUN_DIR={empty_folder}/mine" in lines
    assert list(empty_folder.iterdir()) == []  # nothing is written


@pytest.mark.slow
def test_a_job_that_would_save_nothing_on_the_way_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    weights = ["snapshot=weights"]
    for keys, is_said in ((weights, True), ([*weights, "snapshot.every_steps=50"], False), ([], False)):
        assert main([*JOB, *keys, "--dry-run"]) == 0
        assert ("neither snapshot.every_steps nor" in capsys.readouterr().err) == is_said


def test_ranks_on_cpu_cores_ask_for_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, "cluster.device=cpu", "threads_per_rank=4", "cluster.interface=ib0")
    assert not any("gpu:" in line for line in lines)
    assert "#SBATCH --cpus-per-task=8" in lines
    assert "export DEVICE=cpu" in lines
    assert "export INTERFACE=ib0" in lines


def test_replicas_fill_the_machines_that_the_job_gets(capsys: pytest.CaptureFixture[str]) -> None:
    """A range of nodes stands behind their number, so it is what counts; the script tells the run how many it has become."""
    lines = dry_run(capsys, "pipeline.num_stages=2", "parallel=replicas", 'cluster.options=["--nodes=1-2"]')
    assert [line for line in lines if "--nodes=" in line][:2] == ["#SBATCH --nodes=2", "#SBATCH --nodes=1-2"]
    assert "#SBATCH --gres=gpu:2" in lines
    words = ["pipeline.num_stages=2", "parallel=replicas", 'cluster.options=["--nodes=1-2"]']
    assert shlex.split(lines[-1])[-3:] == words
    body = (ROOT / "launch" / "slurm.sbatch").read_text()
    assert 'train "$@" \\\n  cluster.num_nodes="$SLURM_NNODES" cluster.ranks_per_node="$RANKS_PER_NODE"' in body


def test_a_job_that_is_not_requeued_does_not_do_it_itself(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, "cluster.requeue=false", "cluster.max_restarts=5")
    assert "#SBATCH --no-requeue" in lines
    assert "export MAX_RESTARTS=-1" in lines


def test_the_script_is_bash_and_passes_each_override_as_it_was_typed(
    capsys: pytest.CaptureFixture[str], empty_folder: pathlib.Path
) -> None:
    (empty_folder / "it's here").mkdir()
    (empty_folder / "it's here" / "a.txt").write_text("some text " * 2000)
    (empty_folder / "it's here" / "b.txt").write_text("more text " * 2000)
    path = 'data.path="it\'s here"'
    lines = dry_run(capsys, "data=text", path, "pipeline.balance=[2,3,3,2]", "run_dir=mine", "resume=auto")
    assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=False).returncode == 0
    words = shlex.split(lines[-1])
    assert words[:2] == ["exec", "bash"]
    assert pathlib.Path(words[2]) == ROOT / "launch" / "slurm.sbatch"
    # run_dir and resume are the script's own business, at each start
    assert words[3:] == [*JOB[1:], "data=text", path, "pipeline.balance=[2,3,3,2]"]


REFUSED = {
    "too many stages": (["pipeline.num_stages=6"], ["num_nodes=2", "ranks_per_node=2", "need 6 ranks", "num_stages=4"]),
    "too few stages": (["pipeline.num_stages=3"], ["make 4 ranks", "need 3 ranks", "num_stages=4"]),
    "interleaved": (["pipeline.stages_per_rank=2"], ["stages_per_rank=2", "need 2 ranks", "num_stages=8"]),
    "replicas": (
        ["parallel.num_replicas=3", "pipeline.num_stages=2", "pipeline.num_microbatches=4"],
        ["make 4 ranks", "parallel.num_replicas=3", "need 6 ranks", "parallel.num_replicas=2"],
    ),
    "replicas left over": (["parallel=replicas", "pipeline.num_stages=3"], ["4 ranks are not a multiple of the 3", "start 3 or 6"]),
    "uneven": (["cluster.ranks_per_node=null", "cluster.num_nodes=3"], ["num_nodes=3", "a multiple"]),
    "other snapshot": (["resume=somewhere"], ["resume=somewhere", "resume=auto", "init_from"]),
    "no rendezvous": (["cluster=local"], ["cluster.num_nodes=2", "cluster.rendezvous", "cluster=slurm"]),
    "no job": (["cluster=local", "cluster.num_nodes=1", "pipeline.num_stages=2", "--dry-run"], ["--dry-run", "cluster=slurm"]),
    "no SLURM": ([], ["cluster=slurm", "sbatch", "module load slurm", "apt-get install slurm-client", "--dry-run"]),
    }  # fmt: skip


@pytest.mark.quick("replicas left over", "uneven", "other snapshot", "no job", "no SLURM")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_submitted(
    name: str, empty_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    overrides, words = REFUSED[name]
    assert main([*JOB, *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert [word for word in words if word not in captured.err] == [], captured.err
    assert list(empty_folder.iterdir()) == []


def test_tasks_of_srun_that_are_not_one_per_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert main([*JOB, "cluster.rendezvous=node1:29500"]) == 2
    assert "srun started 4 tasks" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "srun started 4 tasks" in (error := capsys.readouterr().err)
    assert "cluster.rendezvous=HOST:PORT" in error


def test_the_environment_of_the_ranks() -> None:
    """What the caller has set stays; a CPU rank sees no GPU."""
    program = f"set -eu; source {ROOT}/launch/env.sh; python3 -c 'import json, os; print(json.dumps(dict(os.environ)))'"

    def after(**given: str) -> dict[str, str]:
        environment = {"PATH": "/usr/bin:/bin", **given}
        done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, check=True)
        found: dict[str, str] = json.loads(done.stdout)
        return found

    plain = after(CUDA_VISIBLE_DEVICES="3", NCCL_DEBUG="INFO")
    assert plain.items() >= {
        ("CUDA_VISIBLE_DEVICES", "3"),
        ("NCCL_DEBUG", "INFO"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    }
    assert "GLOO_SOCKET_IFNAME" not in plain
    given = after(DEVICE="cpu", INTERFACE="ib0", NCCL_SOCKET_IFNAME="ib1", CUDA_VISIBLE_DEVICES="3")
    assert given.items() >= {("GLOO_SOCKET_IFNAME", "ib0"), ("NCCL_SOCKET_IFNAME", "ib1"), ("CUDA_VISIBLE_DEVICES", "")}


def test_scripts_are_clean() -> None:
    shellcheck = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
    launchers, ci = (sorted(path for path in (ROOT / name).iterdir()) for name in ("launch", ".ci"))
    assert (len(launchers), len(ci)) == (5, 3)
    scripts = [str(path.relative_to(ROOT)) for path in (*launchers, *ci, ROOT / "docker" / "try.sh")]
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
