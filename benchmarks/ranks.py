"""Ranks as processes of their own, over gloo: `run_ranks(4, function, ...)` returns what `function(...)` gave on each.

The processes are forked from a server that has loaded torch and the peers, so that starting eight of them takes
a second. A rank may live in a network namespace of its own, behind a link of a chosen speed.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = mp.get_context("forkserver")
_CLONE_NEWNET = 0x40000000
# A GPU's allocator keeps the memory of tensors that are gone; so does that of every rank here, ours and the peers'. Else
# each tensor costs the kernel thousands of page faults, which on a virtual machine may reach as far as its host.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_ARENA_MAX": "1",  # one heap for all threads, as a device has one memory
}


@dataclass(frozen=True)
class Place:
    """Where a rank runs: in a network namespace, with its interface there; None is the namespace of the caller."""

    namespace: str | None = None
    interface: str | None = None


class RanksFailed(RuntimeError):
    """Some rank raised, died or did not end in time; the message has the text of the first that did."""


def preload(*modules: str) -> None:
    """What the fork server imports before the first rank starts; a module that is missing is skipped."""
    os.environ.update(_KEEP_MEMORY)  # read when a process starts, so by the server for all that it forks
    _CONTEXT.set_forkserver_preload(["torch", "pipetrain.runtime.pipeline", *modules])


def touch_memory(num_bytes: int) -> None:
    """Have that much memory of this process backed by the machine, so that tensors come to lie in it.

    Where it had to be fetched from the host first, 2.5 MB took 8 to 12 ms: as much as a quarter of an emulated forward.
    """
    torch = importlib.import_module("torch")
    torch.empty(num_bytes, dtype=torch.uint8).fill_(0)


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    places: Sequence[Place] = (),
    store_host: str = "127.0.0.1",
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """The values that the ranks return, in rank order. The store lives here, so that every rank may come and go.

    Raises:
        RanksFailed: with the traceback of the rank that failed first; all processes are gone by then.
    """
    from torch.distributed import TCPStore

    store = TCPStore(store_host, 0, None, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + timeout_seconds
    processes, connections = [], []
    for rank in range(num_ranks):
        ours, theirs = _CONTEXT.Pipe()
        place = places[rank] if places else Place()
        arguments = (theirs, rank, num_ranks, store_host, store.port, place, function, args)
        process = _CONTEXT.Process(target=_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    patience = 0.0  # the others of a rank that failed may wait for it for long
    try:
        values = _collect(connections, deadline, timeout_seconds)
        patience = 5.0
        return values
    finally:
        for process in processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in connections:
            connection.close()


def _collect(connections: Sequence[Connection], deadline: float, timeout_seconds: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(connections):
        waiting = {connection: rank for rank, connection in enumerate(connections) if rank not in values}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(f"ranks {sorted(waiting.values())} did not end within {timeout_seconds:g} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                values[rank], error = connection.recv()
            except EOFError:
                error = "the process died without a word"
            if error is not None:
                raise RanksFailed(f"rank {rank}: {error}")
    return [values[rank] for rank in range(len(connections))]


def _main(
    connection: Connection,
    rank: int,
    num_ranks: int,
    store_host: str,
    port: int,
    place: Place,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    _enter(place)
    _silence_stdout()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OMP_NUM_THREADS="1")
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    dist = importlib.import_module("torch.distributed")
    try:
        limit = timedelta(seconds=60)
        store = dist.TCPStore(store_host, port, None, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        connection.send((function(*args), None))
    except BaseException:
        with suppress(BrokenPipeError):  # whoever started this rank is gone
            connection.send((None, traceback.format_exc(limit=-4).strip()))
    # The peers leave threads and groups behind whose ends may wait for each other; the result has been sent.
    connection.close()
    os._exit(0)


def _silence_stdout() -> None:
    """A peer prints what it builds; the table or the JSON of the caller goes there."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.close(quiet)


def _enter(place: Place) -> None:
    """Move this process, which has one thread yet, into its namespace."""
    if place.interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=place.interface, TP_SOCKET_IFNAME=place.interface)
    if place.namespace is None:
        return
    with open(f"/var/run/netns/{place.namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {place.namespace}")
