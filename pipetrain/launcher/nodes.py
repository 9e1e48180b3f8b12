"""Several machines that run one training: where they meet, and what torchrun has to know of it."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipetrain.config.problem import opening_line
from pipetrain.config.records import ClusterConfig, PipelineConfig
from pipetrain.launcher.outcome import Exit, handled

# What torch may treat in its own way, by ending the ranks at once: torchrun would do so without the other machines, whose torchruns then wait
# five minutes for it.
SIGNALS_OF_TORCHRUN = "SIGHUP,SIGQUIT"

BACKEND = "pipetrain"  # of torchrun's rendezvous, in `signed.py`
KEY_VARIABLE = "PIPETRAIN_RENDEZVOUS_KEY"
KEY_FILE_VARIABLE = "PIPETRAIN_RENDEZVOUS_KEY_FILE"
_KEY_FILE = "~/.config/pipetrain/rendezvous.key"
_LEAST_KEY_BYTES = 16


def read_key() -> bytes:
    """What machines sign their rendezvous with: of the environment, or of a file that only its owner can read.

    Raises:
        ValueError: there is none, it is short, or others can read it.
    """
    given = os.environ.get(KEY_VARIABLE)
    path = Path(os.environ.get(KEY_FILE_VARIABLE, _KEY_FILE)).expanduser()
    make = f"umask 077; mkdir -p {path.parent}; head -c 32 /dev/urandom | base64 > {path}"
    if given is None and not path.is_file():
        raise ValueError(
            f"machines sign their rendezvous, and there is no key: set {KEY_VARIABLE}, or make {path} ({make}) and copy it to every "
            "machine with mode 0600"
        )
    if given is None and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"{path}: others can read this key; chmod 600 {path}, or make another")
    key = path.read_bytes().strip() if given is None else given.encode()
    if len(key) < _LEAST_KEY_BYTES:
        where = KEY_VARIABLE if given is not None else path
        raise ValueError(f"{where} has {len(key)} bytes, at least {_LEAST_KEY_BYTES} are needed; {make}")
    return key


class EndedEarly(Exception):
    """Machines did not find each other (`code` 1), or a request to stop came before the ranks were there (75); the message is for the user."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Nodes:
    """`num_nodes` machines, on each of which the same command is started. They meet at `rendezvous` (HOST:PORT)."""

    num_nodes: int
    rendezvous: str
    node_rank: int | None  # which of them this is; None: they agree on that when they meet
    timeout_seconds: float  # how long one waits for the others

    def torchrun_options(self) -> list[str]:
        """What torchrun gets besides the ranks of this machine and what they run."""
        wait = int(self.timeout_seconds)
        common = [
            f"--nnodes={self.num_nodes}",
            f"--rdzv-endpoint={self.rendezvous}",
            "--rdzv-id=pipetrain",
            f"--signals-to-handle={SIGNALS_OF_TORCHRUN}",
            f"--log-dir={os.devnull}",  # ranks write to the terminal, and none is left where torchrun is killed
        ]
        if self.node_rank is None:
            # Before the first machine is up there is nothing to connect to, which counts as reading.
            waits = f"--rdzv-conf=join_timeout={wait},read_timeout={wait}"
            return [*common, f"--rdzv-backend={BACKEND}", waits]
        return [*common, "--rdzv-backend=static", f"--node-rank={self.node_rank}", f"--rdzv-conf=timeout={wait}"]

    def did_not_meet(self, reason: BaseException) -> str:
        """What to tell when torchrun could not bring the machines together."""
        text = opening_line(reason).rstrip(".")
        this = "this machine" if self.node_rank is None else f"machine {self.node_rank + 1}"
        return (
            f"{this} of {self.num_nodes} did not meet the others at cluster.rendezvous={self.rendezvous} "
            f"({text}): is the command running on all of them, does that name lead to "
            "the first, and is the port free there and open between them?"
        )


def choose_ranks_per_node(
    cluster: ClusterConfig, pipeline: PipelineConfig, ranks_per_replica: int, num_replicas: int = 1
) -> int:
    """How many ranks each machine starts, of those that `num_replicas` times `pipeline` ask for.

    Raises:
        ValueError: machines and ranks do not fit each other.
    """
    num_ranks = num_replicas * ranks_per_replica
    needed = _needed(pipeline, num_ranks, num_replicas)
    if cluster.ranks_per_node is None:
        per_node, rest = divmod(num_ranks, cluster.num_nodes)
        if rest or per_node == 0:
            raise ValueError(
                f"cluster.num_nodes={cluster.num_nodes}: {needed}, which cannot be spread evenly; "
                "the number of ranks must be a multiple of the number of nodes"
            )
        return per_node
    there_are = cluster.num_nodes * cluster.ranks_per_node
    if there_are != num_ranks:
        stages, rest = divmod(there_are * pipeline.stages_per_rank, num_replicas)
        fitting = [] if rest else [f"pipeline.num_stages={stages}"]
        if there_are % ranks_per_replica == 0:
            fitting.append(f"parallel.num_replicas={there_are // ranks_per_replica}")
        raise ValueError(
            f"cluster.num_nodes={cluster.num_nodes} x cluster.ranks_per_node={cluster.ranks_per_node} make {there_are} ranks, "
            f"but {needed}; set {', or '.join([*fitting, 'other nodes and ranks per node'])}"
        )
    return cluster.ranks_per_node


def _needed(pipeline: PipelineConfig, num_ranks: int, num_replicas: int) -> str:
    replicas = f"parallel.num_replicas={num_replicas} and " if num_replicas > 1 else ""
    if pipeline.num_stages is None and not replicas:
        return f"there are {num_ranks} ranks"
    return (
        f"{replicas}pipeline.num_stages={pipeline.num_stages or num_ranks // num_replicas * pipeline.stages_per_rank} with "
        f"pipeline.stages_per_rank={pipeline.stages_per_rank} need {num_ranks} ranks"
    )


def node_rank_in_slurm(num_nodes: int) -> int | None:
    """The number of this task where srun has started one per machine; None where it has not.

    Raises:
        ValueError: srun started another number of tasks, and each of them would start ranks.
    """
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    if num_tasks is None:
        return None
    if int(num_tasks) != num_nodes:
        raise ValueError(
            f"cluster.num_nodes={num_nodes}, but srun started {num_tasks} tasks of this command, each of which starts the "
            "ranks of a whole machine; use srun --ntasks-per-node=1 and cluster.num_nodes=$SLURM_NNODES"
        )
    return int(os.environ["SLURM_PROCID"])


@contextlib.contextmanager
def passing_signals_on(ranks: Callable[[], list[int]], num_ranks: int) -> Iterator[None]:
    """A request to stop goes to the ranks of this machine and to nobody else: they tell those of the others.

    Raises:
        EndedEarly: not all of them have announced themselves, so there is nothing to save; torchrun ends those that run.
    """

    def handle(signum: int, _frame: FrameType | None) -> None:
        started = ranks()
        if len(started) < num_ranks:
            raise EndedEarly(
                Exit.STOPPED, f"stopped by {signal.Signals(signum).name} before the ranks of this machine were there"
            )
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signum)

    with handled(handle):
        yield
