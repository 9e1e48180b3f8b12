"""Commands as a user types them: processes of their own, with what they say, that leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from ranks import PATIENCE_SECONDS

from pipetrain.monitor.lines import read_lines

Process = subprocess.Popen  # of text
PIPETRAIN = [sys.executable, "-m", "pipetrain.cli", "train"]
_LISTENS = "0A"  # include/net/tcp_states.h
KEY = {"PIPETRAIN_RENDEZVOUS_KEY": "the key of all tests"}  # of machines that meet


def environment() -> dict[str, str]:
    """The package from this checkout, wherever a command starts; and nothing of a launcher that runs the tests."""
    root = str(pathlib.Path(__file__).resolve().parents[1])
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("SLURM_")}
    return {**kept, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **KEY}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun() -> list[str]:
    """On one machine, as the documents have it, at a port of its own."""
    return [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}"]


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
    """Runs a command in `folder` to its end, whatever its exit code. What is idle in runs there has a cause."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment(), timeout=PATIENCE_SECONDS
    )
    for run in (*folder.glob("*/metrics.jsonl"), folder / "runs" / "latest" / "metrics.jsonl"):
        assert_idle_time_has_a_cause(run)
    return done


def assert_idle_time_has_a_cause(metrics: pathlib.Path) -> None:
    """At most 2 % of a step is unexplained, on each rank, however busy the machine is."""
    for line in read_lines(metrics):
        for seconds in line.get("unexplained_seconds", ()):
            assert seconds is None or seconds <= 0.02 * line["step_seconds"], f"{metrics}, step {line['step']}"


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


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses at which a process listens, as /proc/net/tcp and tcp6 write them, and the ports."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended
        sockets = {link.removeprefix("socket:") for link in links_of(pid)}
        for name in ("tcp", "tcp6"):
            for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENS and f"[{columns[9]}]" in sockets:
                    address, _, port = columns[1].partition(":")
                    found.add((address, int(port, 16)))
    return found


def links_of(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry.path))
    return links
