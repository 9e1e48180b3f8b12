"""Handing a job script to SLURM, and what the user types from then on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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
        path.write_text(script)
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
