"""Real gloo ranks for tests: `run_ranks(3, function, ...)` calls `function(...)` in three processes and returns what each gave.

The processes come from a fork server that has torch loaded, so a start costs milliseconds. The parent hosts the store,
so that any rank may die. Whatever is still alive at the time-out is killed and reported.
"""

from __future__ import annotations

import faulthandler
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
from typing import Any

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "pipetrain.runtime.pipeline"])


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, an error's text (notes included), or a signal."""

    rank: int
    pid: int
    value: Any
    error: str | None
    exit_code: int
    seconds: float


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """The values that the ranks return, in rank order; fails with the text of the ranks that did not."""
    outcomes = run_outcomes(num_ranks, function, *args, timeout=timeout)
    failed = [f"rank {o.rank} (exit code {o.exit_code}):\n{o.error}" for o in outcomes if o.error or o.exit_code]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def run_outcomes(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
    """How each rank ended. A rank that has not by `timeout` fails the test, with a stack trace on its stderr."""
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
    ended: dict[int, tuple[Any, str | None, float]] = {}
    while len(ended) < num_ranks and time.monotonic() - start < timeout:
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in ended}
        for connection in wait(list(waiting), timeout=1.0):
            assert isinstance(connection, Connection)
            try:
                value, error = pickle.loads(connection.recv_bytes())
            except EOFError:
                value, error = None, None
            ended[waiting[connection]] = (value, error, time.monotonic() - start)
    hung = [rank for rank in range(num_ranks) if rank not in ended]
    for rank in hung:
        os.kill(ranks[rank][0].pid, signal.SIGABRT)
    outcomes = []
    for rank, (process, connection) in enumerate(ranks):
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
            hung.append(rank)
        connection.close()
        value, error, seconds = ended.get(rank, (None, "hung", timeout))
        outcomes.append(Outcome(rank, process.pid, value, error, process.exitcode, seconds))
    assert not hung, f"ranks {hung} hung for {timeout} s: {[(o.rank, o.error, o.exit_code) for o in outcomes]}"
    return outcomes


def _main(
    connection: Connection, rank: int, num_ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    if num_ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    try:
        # Plain pickle copies a tensor; the pipe's own would share its memory with a process that ends.
        connection.send_bytes(pickle.dumps((function(*args), None)))
    except Exception:
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.destroy_process_group()
