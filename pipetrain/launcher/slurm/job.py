"""The job of a run: its script (what SLURM is asked for, the settings of launch/slurm.sbatch, and that), handed to SLURM, and what the user types from then on."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipetrain.config.read_files import shipped
from pipetrain.config.records import RunConfig
from pipetrain.config.write_files import replace_file

# What the job script decides itself, anew at each start.
_OF_THE_JOB = ("run_dir", "resume", "cluster.rendezvous")


def job_script(config: RunConfig, overrides: Sequence[str], run_dir: Path, ranks_per_node: int) -> str:
    """The text that sbatch gets. The same run folder at each start, so that the run goes on in it."""
    cluster = config.cluster
    kept = [text for text in overrides if text.partition("=")[0] not in _OF_THE_JOB]
    launch = shipped("launch")
    command = ["exec", "bash", str(launch / "slurm.sbatch"), *kept]
    settings = {
        "PYTHON": sys.executable,
        "LAUNCH": str(launch),
        "RUN_DIR": str(run_dir),
        "RANKS_PER_NODE": str(ranks_per_node),
        "MAX_RESTARTS": str(cluster.max_restarts if cluster.requeue else -1),
        "INTERFACE": cluster.interface or "",
        "DEVICE": cluster.device,
    }
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {directive}" for directive in _directives(config, run_dir, ranks_per_node)),
        "# Written by `pipetrain train cluster=slurm`; what each setting does is said in the script that comes last.",
        *(f"export {key}={shlex.quote(value)}" for key, value in settings.items()),
        " ".join(map(shlex.quote, command)),
    ]
    return "\n".join(lines) + "\n"


def _directives(config: RunConfig, run_dir: Path, ranks_per_node: int) -> list[str]:
    cluster = config.cluster
    log = run_dir / "job-%j.log"
    asked = {
        "partition": cluster.partition,
        "account": cluster.account,
        "time": cluster.time_limit,
        "gres": f"gpu:{ranks_per_node}" if cluster.device == "gpu" else None,
    }
    return [
        f"--job-name={config.experiment}",
        f"--nodes={cluster.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={ranks_per_node * (cluster.cpus_per_rank or config.threads_per_rank)}",
        *(f"--{key}={value}" for key, value in asked.items() if value is not None),
        f"--signal=B:USR1@{cluster.signal_seconds}",
        "--requeue" if cluster.requeue else "--no-requeue",
        "--open-mode=append",
        f'--output="{log}"' if " " in str(log) else f"--output={log}",  # sbatch reads it up to a space
        *cluster.options,
    ]


SCRIPT = "job.sh"
_COMMANDS = ("sbatch", "srun", "scontrol", "squeue")


def check_commands() -> None:
    """Raises:
    ValueError: SLURM's commands are not there.
    """
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        raise ValueError(
            f"cluster=slurm: {', '.join(missing)} cannot be found; log in to a machine of the cluster that submits jobs, load its "
            "module (often `module load slurm`), or install SLURM's commands (Debian: apt-get install slurm-client); "
            "--dry-run prints the job script without them"
        )


def submit(script: str, run_dir: Path) -> str:
    """Writes the script into the run folder and submits it; returns the job's number.

    Raises:
        ValueError: the folder cannot be written, or SLURM does not take the job.
    """
    path = run_dir / SCRIPT
    try:
        run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        replace_file(path, script)
        path.chmod(0o750)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir}: the job script cannot be written ({error.strerror})") from error
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"sbatch did not take {path}: {reason}")
    return done.stdout.strip().partition(";")[0]


def how_to_go_on(job: str, run_dir: Path) -> str:
    """How to watch, stop and resume the job."""
    rows = {
        "watch": f"tail -F {run_dir}/job-{job}.log",
        "state": f"squeue --jobs {job}",
        "save and stop": f"scancel --signal=TERM --batch {job}",
        "end": f"scancel {job}",
        "resume": f"sbatch {run_dir / SCRIPT}",
    }
    return "\n".join([f"submitted as job {job}", *(f"  {what:<14} {command}" for what, command in rows.items())])
