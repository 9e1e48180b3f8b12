"""Real gloo ranks for tests: `run_ranks(3, function, ...)` calls `function(...)` in three processes and returns what each gave.

The processes come from a fork server that has torch loaded, so a start costs milliseconds. The parent hosts the store,
so that any rank may die. Whatever is still alive after PATIENCE_SECONDS is killed and reported.

No test asserts how long something took. A wait that a rank must not sit out has the time-out NEVER_SECONDS; one that it must
has a clock of its own (`time_out_once`).
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# For what takes a second on an idle machine. With eight busy processes beside it a start alone takes ten.
PATIENCE_SECONDS = float(os.environ.get("PATIENCE_SECONDS", "240"))
# The time-out of what must end without it: whoever sits it out is found hanging before.
NEVER_SECONDS = 10 * PATIENCE_SECONDS
# What is on its way when a rank stops has arrived so much later.
_SETTLED_SECONDS = 3.0

_CONTEXT = mp.get_context("forkserver")
# With what a rank would load by itself when it first makes an optimizer or goes backward, which takes it seconds.
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "pipetrain.runtime.pipeline", "pipetrain.train", "pytest"])


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, an error's text (notes included), or a signal."""

    rank: int
    pid: int
    value: Any
    error: str | None
    exit_code: int


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The values that the ranks return, in rank order; fails with the text of the ranks that did not."""
    outcomes = run_outcomes(num_ranks, function, *args)
    failed = [f"rank {o.rank} (exit code {o.exit_code}):\n{o.error}" for o in outcomes if o.error or o.exit_code]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def run_outcomes(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Outcome]:
    """How each rank ended. A rank that has not by PATIENCE_SECONDS fails the test, with a stack trace on its stderr."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    start = time.monotonic()
    ranks = []
    for rank in range(num_ranks):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=_main, args=(theirs, rank, num_ranks, store.port, function, args), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    ended: dict[int, tuple[Any, str | None]] = {}
    while len(ended) < num_ranks and time.monotonic() - start < PATIENCE_SECONDS:
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in ended}
        for connection in wait(list(waiting), timeout=1.0):
            assert isinstance(connection, Connection)
            try:
                value, error = pickle.loads(connection.recv_bytes())
            except EOFError:
                value, error = None, None
            ended[waiting[connection]] = (value, error)
    hung = [rank for rank in range(num_ranks) if rank not in ended]
    for rank in hung:
        os.kill(ranks[rank][0].pid, signal.SIGABRT)
    outcomes = []
    for rank, (process, connection) in enumerate(ranks):
        process.join(PATIENCE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            hung.append(rank)
        connection.close()
        value, error = ended.get(rank, (None, "hung"))
        outcomes.append(Outcome(rank, process.pid, value, error, process.exitcode))
    assert not hung, (
        f"ranks {hung} hung for {PATIENCE_SECONDS:g} s: {[(o.rank, o.error, o.exit_code) for o in outcomes]}"
    )
    return outcomes


def time_out_once(struck: Callable[[], bool]) -> None:
    """From soon after `struck()` on, all that this rank waits for has taken longer than any time-out.

    What happens before that has all the time in the world. It ends with the rank's process.
    """
    from pipetrain.comm import failure

    failure.time = _LeapingClock(struck)  # type: ignore[assignment]


class _LeapingClock:
    """Goes as time does, and leaps once."""

    sleep = staticmethod(time.sleep)

    def __init__(self, struck: Callable[[], bool]) -> None:
        self._struck = struck
        self._struck_at: float | None = None

    def monotonic(self) -> float:
        now = time.monotonic()
        if self._struck_at is None and self._struck():
            self._struck_at = now
        leaps = self._struck_at is not None and now - self._struck_at > _SETTLED_SECONDS
        return now + (NEVER_SECONDS if leaps else 0.0)


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _main(
    connection: Connection, rank: int, num_ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    gc.freeze()  # what has been loaded is no test's: neither the collector nor who looks for tensors needs to go through it
    torch.set_num_threads(1)
    if num_ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=PATIENCE_SECONDS))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=store.timeout)
        dist.barrier()  # a rank that left now would close the connections that a slower one is still making
    try:
        # Plain pickle copies a tensor; the pipe's own would share its memory with a process that ends.
        connection.send_bytes(pickle.dumps((function(*args), None)))
    except Exception:
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.destroy_process_group()
