"""Training runs over hosts of their own: torchrun on each, as it is started on the machines of a cluster."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import commands
from commands import Process, children_of, is_alive
from ranks import PATIENCE_SECONDS
from resumed import metrics_of

from benchmarks.links.hosts import DEVICE, Host, Hosts

PORT = 29400
ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 6
RUN = [
    "experiment=smoke", "data=text", "data.path=text", "model.dropout=0.1", f"steps={STEPS}", "observe.progress=false",
]  # fmt: skip


def environment(package: pathlib.Path = ROOT, interface: str | None = DEVICE) -> dict[str, str]:
    """The package from `package`, over the network between the hosts; None: over what the command itself chooses."""
    chosen = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    return {**commands.environment(), **chosen, "PYTHONPATH": str(package)}


def start_run(network: Hosts, folder: pathlib.Path, *options: str) -> list[Process]:
    """Starts torchrun on every host, a rank each, meeting at the first."""
    return [start_torchrun(network, host, folder, *options) for host in network.hosts]


def start_command(network: Hosts, folder: pathlib.Path, *options: str, interface: str | None = DEVICE) -> list[Process]:
    """Starts `pipetrain train` on every host, a rank each, as srun does."""
    number = len(network.hosts)
    where = [f"cluster.num_nodes={number}", "cluster.ranks_per_node=1", f"pipeline.num_stages={number}"]
    where.append(f"cluster.rendezvous={network.hosts[0].address}:{PORT}")
    words = [sys.executable, "-m", "pipetrain.cli", "train", *RUN, *where, *options]
    tasks = ({"SLURM_STEP_NUM_TASKS": str(number), "SLURM_PROCID": str(task)} for task in range(number))
    variables = environment(interface=interface)
    return [start(host.command(words), folder, variables | task) for host, task in zip(network.hosts, tasks)]


def start_torchrun(network: Hosts, host: Host, folder: pathlib.Path, *options: str) -> Process:
    first = network.hosts[0]
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={len(network.hosts)}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:{PORT}",
        # What torchrun itself waits for an answer of its store; without, 60 s.
        f"--rdzv-conf=is_host={int(host == first)},read_timeout=5",
        f"--local-addr={host.address}",
        "--max-restarts=0",
    ]
    words = [*torchrun, "-m", "pipetrain.train", *RUN, f"pipeline.num_stages={len(network.hosts)}", *options]
    return start(host.command(words), folder, environment())


def start(words: Sequence[str], folder: pathlib.Path, variables: dict[str, str]) -> Process:
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=variables,
        start_new_session=True,
    )


def end(process: Process) -> tuple[int, str]:
    """Exit code and stderr; whatever of it is still there after PATIENCE_SECONDS is killed and fails the test."""
    ranks = children_of(process.pid)
    try:
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        left = [pid for pid in {process.pid, *ranks} if process.poll() is None or is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == [], f"processes {left} were left behind"
    return process.returncode, stderr


def wait_until(ready: Callable[[], bool], processes: Sequence[Process]) -> None:
    """Looks again and again, as long as the processes run."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not get that far in time"
        time.sleep(0.02)


def losses_of(run: pathlib.Path) -> list[tuple[int, float, float]]:
    """What must be equal bit for bit: step, loss, norm of the gradients."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics_of(run)]
