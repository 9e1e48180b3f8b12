"""Communicators over gloo, for messages of the host, and a thread that waits for them, so that the thread that computes need not.

Two ranks: the chain and the stage edges on a CPU. Several, in a ring: sums of gradients.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store, Work

from pipetrain.comm.failure import Monitor

# How long a transfer itself may take. Whoever needs its result times out much earlier and says so; this only has to be
# long, because a gloo wait that times out breaks the connection.
FOREVER = timedelta(days=7)
_DESCRIPTORS = Path("/proc/self/fd")
_SILENT_SECONDS = 1  # a stranger that connects and says nothing never becomes a descriptor; a rank speaks at once
_opening = threading.Lock()
_LAZY = "TORCH_GLOO_LAZY_INIT"

Job = Callable[[], Callable[[], None]]
Transfer = Callable[[], Work | None]


class Courier:
    """Runs jobs one after the other in a thread of its own. A job transfers, and returns what publishes its result.

    `peer` is what the other rank is called, or a function that says it.
    """

    def __init__(self, name: str, peer: str | Callable[[], str], monitor: Monitor) -> None:
        self._peer = peer
        self._monitor = monitor
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._num_given = self._num_ended = 0  # each counted by one thread alone
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, job: Job) -> None:
        self._num_given += 1
        self._jobs.put((what, job))

    def begun(self, transfer: Transfer) -> Transfer:
        """`transfer`, for the job that is submitted next; begun at once if all before it have ended, so that their order stays.

        The message then leaves before this courier's thread has woken: waking takes longer than a short message.
        """
        if self._num_given != self._num_ended:
            return transfer
        try:
            work = transfer()
        except RuntimeError as error:  # the connection is broken: the job says so, as it does wherever it happens
            return functools.partial(_raise, error)
        return lambda: work

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            what, job = item
            try:
                publish = job()
                self._num_ended += 1
                self._monitor.done(publish)
            except Exception as error:
                self._monitor.lost(what, self._peer if isinstance(self._peer, str) else self._peer(), error)
                return
            del item, job, publish

    def close(self) -> None:
        """End the thread, once its jobs are done: what is under way ends when the other rank has taken it, or is gone."""
        self._jobs.put(None)
        self._thread.join(self._monitor.timeout_seconds)


def finish(work: Work | None) -> None:
    """Wait for one transfer, on the thread of a courier."""
    if work is not None:
        work.wait(FOREVER)


def _raise(error: RuntimeError) -> None:
    raise error


_TAG_NOBODY_SENDS = 1


class Pair(Protocol):
    """A communicator of two ranks, 0 and 1; or of several, in a ring."""

    def send(self, tensors: list[Tensor], target: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work: ...
    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Work: ...


def make_pair(store: Store, name: str, place: int, peer: str, monitor: Monitor, num_ranks: int = 2) -> Pair:
    """A communicator with `peer`; or of more ranks for sums, where each connects to those before and after it alone. `name` is unique and
    the same on all; `place` counts from 0; `peer` says who the others are.

    Raises PipelineError: another rank did not come within the time-out of `monitor`, or is gone.
    """
    timeout = timedelta(seconds=monitor.timeout_seconds)
    try:
        with connecting_on_use() if num_ranks > 2 else contextlib.nullcontext():
            return _connected(store, name, place, num_ranks, timeout)
    except RuntimeError as error:
        if "temporarily unavailable" in str(error):  # what the system has no memory for: that is no other rank's fault
            raise
        raise monitor.unmet(name, peer, error) from error


def _connected(store: Store, name: str, place: int, num_ranks: int, timeout: timedelta) -> Pair:
    """A group whose members have come. Its port opens only when all are there, and closes then, so no stranger finds it."""
    store = PrefixStore(name, store)
    store.set(f"here/{place}", "")
    store.wait([f"here/{other}" for other in range(num_ranks)], timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    with opened_ports() as ports:
        names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        devices = [ProcessGroupGloo.create_device(interface=name) for name in names]
        options._devices = devices or [ProcessGroupGloo.create_default_device()]  # those that torch itself would choose
    try:
        group: Pair = ProcessGroupGloo(store, place, num_ranks, options)  # type: ignore[assignment]
        if num_ranks > 2:  # their connections are made on use: now, and not in a step
            reduces = AllreduceOptions()
            reduces.timeout = timeout
            group.allreduce([torch.zeros(1)], reduces).wait(timeout)
    finally:
        close_ports(ports)
    return group


def break_off(pair: Pair, other: int, patience_seconds: float = 1e-3) -> bool:
    """Close the connection: a wait on it fails, here and at the other end. Returns whether it was closed already. A caller that has lost
    one of several connections finds out which with a longer `patience_seconds`.

    A thread that is inside a gloo wait when the interpreter ends would bring the process down with it, and the other rank
    should not have to wait for this process to end. A receive that times out closes its pair, so this makes one time out.
    """
    try:
        pair.recv([torch.empty(1)], other, _TAG_NOBODY_SENDS).wait(timedelta(seconds=patience_seconds))
    except RuntimeError as error:
        return "imed out" not in str(error)
    return False


# How gloo listens and connects. It keeps its listeners as long as a group lives, and never closes a connection of a stranger: a port
# scanner would take one descriptor after the other, up to the limit of the process. So each port is closed once the members have come.


@contextlib.contextmanager
def connecting_on_use() -> Iterator[None]:
    """Gloo groups made meanwhile connect two ranks when these first talk to each other."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZY]
        if before is not None:
            os.environ[_LAZY] = before


@contextlib.contextmanager
def opened_ports() -> Iterator[set[int]]:
    """The descriptors of the ports that are opened in the block, which waits for nobody; filled in at its end.

    Empty where the system does not list descriptors as Linux does.
    """
    found: set[int] = set()
    with _opening:
        before = _listening()
        yield found
        found |= _listening() - before
        for descriptor in found:
            with socket.socket(fileno=os.dup(descriptor)) as port:
                port.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)


@contextlib.contextmanager
def closing_ports() -> Iterator[None]:
    """Closes the ports that are opened in the block, which may wait for other ranks: no other thread may open one meanwhile."""
    before = _listening()
    try:
        yield
    finally:
        close_ports(_listening() - before)


def close_ports(descriptors: set[int]) -> None:
    """Strangers are refused from now on; whoever is connected stays.

    gloo closes the descriptors itself later: until then their numbers must not be those of something else.
    """
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for descriptor in descriptors:
            os.dup2(nothing, descriptor, inheritable=False)
    finally:
        os.close(nothing)


def _listening() -> set[int]:
    found = set[int]()
    for entry in _DESCRIPTORS.iterdir() if sys.platform.startswith("linux") else ():
        with contextlib.suppress(OSError):  # another thread has closed it
            if entry.is_socket():
                with socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(int(entry.name))
    return found
