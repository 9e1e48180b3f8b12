"""A real SLURM cluster on this machine: munge, slurmctld and two slurmd, in a temporary folder and on free ports.

    python tests/slurm/cluster.py          starts one, says how to use it, and ends it with Ctrl-C

It needs root, and Debian's packages of SLURM, which `install` gets with apt-get.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PACKAGES = ("slurm-wlm", "munge", "slurm-client", "slurmd", "slurmctld")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2")
CONF = """
ClusterName=pipetrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
KillWait=10
SlurmctldTimeout=60
SlurmdTimeout=60
SchedulerParameters=sched_min_interval=0,bf_interval=5
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=8000 State=UNKNOWN"


def why_not() -> str | None:
    """Why there can be no cluster here; None: there can."""
    if os.geteuid() != 0:
        return "a SLURM cluster needs root"
    if missing() and shutil.which("apt-get") is None:
        return f"{', '.join(missing())} cannot be found, and there is no apt-get to install them"
    return None


def missing() -> list[str]:
    return [name for name in COMMANDS if shutil.which(name) is None]


def install() -> None:
    """Gets what is missing, with apt-get."""
    if missing():
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (("update",), ("install", "--yes", "--no-install-recommends", *PACKAGES)):
            subprocess.run(
                ["apt-get", "-qq", *words], check=True, env=environment, timeout=300, stdout=subprocess.DEVNULL
            )


@dataclass(frozen=True)
class Cluster:
    """A running cluster. Commands find it through SLURM_CONF."""

    folder: pathlib.Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """What a SLURM command prints."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def is_ready(self) -> bool:
        try:
            return self.run("sinfo", "--noheader", "--format=%t %D").split() == ["idle", str(len(NODES))]
        except AssertionError:
            return False


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """A cluster of two idle nodes, taken down at the end with every job in it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="pipetrain-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    _configure(folder)
    try:
        _start(folder, "munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
               f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed")  # fmt: skip
        _start(folder, "slurmctld", "-f", f"{folder}/slurm.conf")
        for name in NODES:
            _start(folder, "slurmd", "-f", f"{folder}/slurm.conf", "-N", name)
        wait_for(cluster.is_ready, 30, "the nodes are not idle")
        yield cluster
    finally:
        _take_down(cluster)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(ready: Callable[[], bool], seconds: float, otherwise: str) -> float:
    """Looks again and again; returns the seconds that it took."""
    started = time.monotonic()
    while not ready():
        assert time.monotonic() - started < seconds, f"{otherwise} after {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - started


def _configure(folder: pathlib.Path) -> None:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host, ports = socket.gethostname(), _free_ports(len(NODES) + 1)
    lines = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[1:])]
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=host, control_port=ports[0], nodes="\n".join(lines))
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _start(folder: pathlib.Path, *command: str) -> None:
    """Starts a daemon, which leaves its process id in the folder."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def _take_down(cluster: Cluster) -> None:
    """Ends all jobs, then the daemons, each by its process id."""
    with contextlib.suppress(AssertionError):
        jobs = cluster.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            cluster.run("scancel", *jobs)
            wait_for(lambda: not cluster.run("squeue", "--noheader").strip(), 40, "jobs are left")
    for name in (*NODES, "slurmctld", "munged"):
        file = cluster.folder / f"{name}.pid"
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int(file.read_text())
            os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                wait_for(lambda pid=pid: not pathlib.Path(f"/proc/{pid}").exists(), 10, "it runs")


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        raise SystemExit(reason)
    install()
    # In the background a shell ignores Ctrl-C for it, so a plain `kill` has to end it as cleanly.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running() as here, contextlib.suppress(KeyboardInterrupt):
        print(f"two idle nodes: export SLURM_CONF={here.folder}/slurm.conf, then sinfo; Ctrl-C ends them", flush=True)
        signal.pause()
