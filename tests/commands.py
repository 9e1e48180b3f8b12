"""Commands as a user types them: processes of their own, with what they say, that leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from ranks import PATIENCE_SECONDS

Process = subprocess.Popen  # of text
PIPETRAIN = [sys.executable, "-m", "pipetrain.cli", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

KEY = {"PIPETRAIN_RENDEZVOUS_KEY": "the key of all tests"}  # of machines that meet


def environment() -> dict[str, str]:
    """The package from this checkout, wherever a command starts; and nothing of a launcher that runs the tests."""
    root = str(pathlib.Path(__file__).resolve().parents[1])
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("SLURM_")}
    return {**kept, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **KEY}


def begin(folder: pathlib.Path, command: list[str], **variables: str) -> Process:
    """Starts a command in `folder`, in a session of its own; `variables` come on top of `environment()`.

    It hears Ctrl-C, as in a terminal: where the tests are started in the background, a shell has it ignored.
    """
    return subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**environment(), **variables},
        start_new_session=True,
    )


def complete(folder: pathlib.Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder` to its end, whatever its exit code."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment(), timeout=PATIENCE_SECONDS
    )


def end(process: Process) -> tuple[int, str]:
    """Exit code and stderr; nothing of the run is left behind."""
    try:
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            for child in children_of(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
    return process.returncode, stderr


def wait_until(ready: Callable[[], bool], process: Process) -> None:
    """Looks again and again, as long as the process runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not get that far in time"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started: under torchrun, the ranks."""
    children: list[int] = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended meanwhile
            children += map(int, task.read_text().split())
    return sorted(children)


def is_alive(pid: int) -> bool:
    """Whether the process still runs; one that has ended and that nobody has asked about does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
