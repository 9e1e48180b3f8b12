"""Whether a job may start again: not for ever where nothing comes of it. `python -m pipetrain.launcher.slurm.restarts`.

launch/slurm.sbatch asks twice: `begin` when the job starts, which prints a free port for its machines to meet at, and `requeue` when the
run has ended before its last step. A job starts again because of its own requeue, or of SLURM's after a preemption or the loss of a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetrain.config.read_files import read_record
from pipetrain.config.terminal import say
from pipetrain.config.write_files import replace_file

FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections
_FILE = "restarts.json"
_SNAPSHOT = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Restarts:
    """What one start of the job left for the next."""

    step: int  # of the newest snapshot when it started; 0: there was none
    without_progress: int  # restarts in a row, up to it, before which no newer snapshot had come


def newest_step(run_dir: Path) -> int:
    """The step of the newest snapshot in a run folder; 0: there is none."""
    names = (path.name for path in (run_dir / "snapshots").glob("step-*"))
    return max((int(match[1]) for name in names if (match := _SNAPSHOT.fullmatch(name))), default=0)


def begin(run_dir: Path, *, is_restart: bool) -> Restarts:
    """Counts this start of the job and writes it down."""
    step = newest_step(run_dir)
    before = _read(run_dir) if is_restart else None
    stands_still = before is not None and step <= before.step
    now = Restarts(step, before.without_progress + 1 if before is not None and stands_still else 0)
    run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    replace_file(run_dir / _FILE, json.dumps(asdict(now)) + "\n")
    return now


def may_go_on(run_dir: Path, max_restarts: int) -> bool:
    """Whether to restart once more: this start has saved a snapshot, or fewer than `max_restarts` starts in a row saved none."""
    now = _read(run_dir) or Restarts(0, 0)
    return newest_step(run_dir) > now.step or now.without_progress < max_restarts


def given_up(run_dir: Path, max_restarts: int) -> str:
    """The message when the job stops instead of restarting."""
    step = newest_step(run_dir)
    where = f"the newest snapshot is still that of step {step}" if step else "there is no snapshot yet"
    return (
        f"{max_restarts} restarts in a row made no progress ({where}), so the job does not restart "
        "(cluster.max_restarts). The messages above say why; smaller snapshot.every_steps, a longer cluster.time_limit or "
        "larger cluster.signal_seconds help where the time was too short"
    )


def free_port(job_id: int, attempts: int = 64) -> int:
    """The port that belongs to the job's number, or the next one that is free on this machine.

    Raises:
        ValueError: none of them is free.
    """
    for attempt in range(attempts):
        port = FIRST_PORT + (job_id + attempt) % NUM_PORTS
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise ValueError(
        f"{socket.gethostname()}: no free port for the machines to meet at ({attempts} from {FIRST_PORT + job_id % NUM_PORTS} on are taken); "
        "end what holds them (`ss -ltnp` lists it), or give another start: PORT=29500"
    )


def requeue(job: str) -> str:
    """Puts the job back into the queue, unless somebody has cancelled it meanwhile; returns what to say."""
    state = _run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).strip()
    if state != "RUNNING":
        return f"job {job} is {state or 'gone'}, so it is not put back into the queue"
    _run(["scontrol", "requeue", job])
    return f"job {job} waits in the queue again, and will resume from its newest snapshot"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout


def _read(run_dir: Path) -> Restarts | None:
    try:
        return read_record(Restarts, run_dir / _FILE, "")
    except ValueError:  # none yet, or lost with the machine that wrote it
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where the job goes on, 1 where it gives up."""
    parser = argparse.ArgumentParser(prog="python -m pipetrain.launcher.slurm.restarts", description=__doc__)
    parser.add_argument("what", choices=["begin", "requeue"])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--max", type=int, required=True, help="cluster.max_restarts; less than 0: no restart at all")
    parser.add_argument("--port", type=int, default=0, help="where `begin` starts to look: the job's number, or a port")
    arguments = parser.parse_args(argv)
    run_dir, most = arguments.run_dir, arguments.max
    try:
        if arguments.what == "begin":
            now = begin(run_dir, is_restart=os.environ.get("SLURM_RESTART_COUNT", "0") != "0")
            if now.without_progress <= max(most, 0):
                print(free_port(arguments.port))
                return 0
        elif may_go_on(run_dir, most):
            return _say(requeue(os.environ["SLURM_JOB_ID"]), 0)
        return _say(given_up(run_dir, most), 1)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _say(f"the job cannot start again: {error}", 1)
    except ValueError as error:
        return _say(str(error), 1)


def _say(text: str, code: int) -> int:
    say(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
