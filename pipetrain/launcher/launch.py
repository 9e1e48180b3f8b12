"""Starts the ranks of a run on this machine, and ends with their exit code and their message."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipetrain.comm.address import STORE_VARIABLE, check_a_port_is_free, is_rank
from pipetrain.launcher.nodes import SIGNALS_OF_TORCHRUN, EndedEarly, Nodes, passing_signals_on, read_key
from pipetrain.launcher.outcome import (
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    ONE_REQUEST_SECONDS,
    SIGNALS,
    Exit,
    Outcome,
    collect,
    leave_process,
    own_folder,
    processes,
    run_dir_of,
)
from pipetrain.launcher.signed import register

# What ranks get to end a step and write their report before they are killed.
GRACE_SECONDS = 120
# From the first failure that a rank has left until the others are killed: what they get to write their own message.
REMAINS_SECONDS = 5.0
# What torchrun may then take to end itself.
TORCHRUN_SECONDS = 15.0
_LOOK_SECONDS = 0.1
_STORE = "store"


def check_not_a_slurm_task() -> None:
    """Raises:
    ValueError: srun started this command several times, and each of them would start all ranks.
    """
    num_tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks > 1 and not is_rank():
        raise ValueError(
            f"srun started {num_tasks} tasks of this command, each of which would start all ranks; use srun --ntasks=1 on "
            "one node, or one task per node with cluster.num_nodes=$SLURM_NNODES cluster.rendezvous=HOST:PORT"
        )


def launch(
    module: str, arguments: Sequence[str], *, num_ranks: int, threads_per_rank: int, nodes: Nodes | None = None
) -> Outcome:
    """Runs `python -m module arguments` on `num_ranks` ranks of this machine and waits for them.

    The outcome has the first failure's code and message, and the run folder of rank 0. With `nodes` other machines do the
    same; where all went well, only the one with rank 0 has a message.

    Raises:
        ValueError: the ranks could not meet, for this machine has no free port, or no key for the rendezvous with others.
    """
    check_a_port_is_free()
    if nodes is not None and nodes.node_rank is None:
        read_key()  # before anybody waits for anybody
    with own_folder() as folder:
        _prepare_environment(folder, threads_per_rank)
        grace = GRACE_SECONDS if nodes is None else math.inf  # other machines may need longer
        try:
            with remains_ended(folder, grace), passing_signals_on(lambda: processes(folder), num_ranks):
                if nodes is None:
                    killed = _run_here(module, arguments, num_ranks, folder)
                else:
                    killed = _run_torchrun(module, arguments, num_ranks, nodes)
        except EndedEarly as error:
            return Outcome(0, error.code, str(error))
        outcome = sum_up(collect(folder), killed, run_dir_of(folder))
        is_silent = outcome.run_dir is None and outcome.code in (Exit.DONE, Exit.STOPPED)
        return replace(outcome, message="") if is_silent else outcome


def _prepare_environment(folder: Path, threads_per_rank: int) -> None:
    os.environ[FOLDER_VARIABLE] = str(folder)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # 1 would make streams wait for each other
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS_OF_TORCHRUN


def _run_here(module: str, arguments: Sequence[str], num_ranks: int, folder: Path) -> str:
    """Runs all ranks, which meet at a file: a port would be open to every user of the machine. When one fails, the others are ended.
    Returns which rank a signal killed from outside first, or "".
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    _silence_torch()
    common = {STORE_VARIABLE: str(folder / _STORE), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    variables = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)}
    words = ("-u", "-m", module, *arguments)
    ranks = start_processes(
        "rank", sys.executable, dict.fromkeys(variables, words), variables, DefaultLogsSpecs(log_dir=os.devnull)
    )
    try:
        result = ranks.wait(period=_LOOK_SECONDS)
    except SignalException as stop:
        ranks.close(stop.sigval)
        return ""
    except BaseException:  # there is nothing to save yet
        ranks.close(signal.SIGKILL)
        raise
    assert result is not None, "it waits for ever"
    killed = [failure for failure in result.failures.values() if failure.exitcode < 0]
    if not killed:
        return ""
    first = min(killed, key=lambda failure: failure.timestamp)
    signum = signal.Signals(-first.exitcode)
    if signum in SIGNALS:  # passed on before the rank could keep it
        return ""
    return f"rank {first.local_rank} was killed by {signum.name}; out of memory is a frequent cause"


def _run_torchrun(module: str, arguments: Sequence[str], num_ranks: int, nodes: Nodes) -> str:
    """Runs torchrun in this process; returns which rank a signal killed from outside first, or "".

    Raises:
        EndedEarly: the machines did not find each other.
    """
    import torch.distributed as dist
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    _silence_torch()
    register()
    options = [*nodes.torchrun_options(), f"--nproc-per-node={num_ranks}", "--max-restarts=0", "-m", module]
    try:
        torchrun.main([*options, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return f"rank {rank} was killed by {name}; out of memory is a frequent cause"
    except SignalException:
        pass  # the ranks were told and have left their outcome
    except (RendezvousError, dist.DistError, TimeoutError) as error:
        raise EndedEarly(Exit.FAILED, nodes.did_not_meet(error)) from error
    return ""


def _silence_torch() -> None:
    """Ranks say what happened, and not in long tables. Each of torch's modules for this has set a level of its own when it was imported."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def sum_up(outcomes: Sequence[Outcome], killed: str, run_dir: str | None) -> Outcome:
    """One outcome for the run: its first failure, of a rank that did not only wait for another where there is one; else `killed`, which
    rank a signal killed; else how all ranks ended."""
    failed = [outcome for outcome in outcomes if outcome.code not in (Exit.DONE, Exit.STOPPED)]
    if failed:
        return replace(min(failed, key=lambda outcome: outcome.waited), run_dir=run_dir, waited=False)
    if killed:
        return Outcome(0, Exit.FAILED, killed, run_dir)
    if not outcomes:
        return Outcome(0, Exit.FAILED, "the ranks were ended before they could write a report", run_dir)
    return Outcome(outcomes[0].rank, max(outcome.code for outcome in outcomes), outcomes[0].message, run_dir)


@contextlib.contextmanager
def remains_ended(folder: Path, grace_seconds: float = math.inf) -> Iterator[None]:
    """While it is open, a thread kills all ranks that have announced themselves in `folder`: `REMAINS_SECONDS` after the first failed
    outcome there, where torch would give a stopped process 30 seconds; `grace_seconds` after a request to stop; when a second comes.

    Handlers of signals stay as they are: Python's wake-up descriptor tells of each signal besides.
    """
    seen, told = socket.socketpair()
    told.setblocking(False)
    thread = threading.Thread(target=_watch, args=(folder, seen, grace_seconds), name="remains", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        told.close()
        thread.join()
        seen.close()


def _watch(folder: Path, signals: socket.socket, grace_seconds: float) -> None:
    """Until the other end of `signals` is closed."""
    signals.settimeout(_LOOK_SECONDS)
    asked_at, end_at = math.inf, math.inf
    while True:
        try:
            signum = signals.recv(1)
        except TimeoutError:
            signum = b"\0"
        if not signum:
            return
        now = time.monotonic()
        soon = now + REMAINS_SECONDS
        if end_at > soon and any(outcome.code not in (Exit.DONE, Exit.STOPPED) for outcome in collect(folder)):
            end_at = soon
        if now >= end_at or (signum[0] in SIGNALS and now > asked_at + ONE_REQUEST_SECONDS):
            for process in processes(folder):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process, signal.SIGKILL)  # each rank leads a process group
            break
        if signum[0] in SIGNALS:
            asked_at, end_at = min(asked_at, now), min(end_at, now + grace_seconds)
    signals.settimeout(TORCHRUN_SECONDS)
    try:
        while signals.recv(1):
            pass
    except TimeoutError:  # it would do so for as long as TCP tries: a quarter of an hour
        outcome = sum_up(collect(folder), "", None)
        shutil.rmtree(folder, ignore_errors=True)
        for text in ("torchrun waits for its store over a link that seems cut; it has been ended", outcome.message):
            print(f"pipetrain: {text}", file=sys.stderr)
        leave_process(outcome.code)
