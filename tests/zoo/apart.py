"""Tries things in processes of their own, one after the other: what hangs or dies is cut off and named, the rest goes on."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipetrain.verify.beside_loop import Found, Verdict, forking

PATIENCE_SECONDS = 120.0  # for one trial; on a machine with nothing else to do it takes less than one
START_SECONDS = 600.0  # for a process to load torch, likewise


class Trial(Protocol):
    """One thing to try. Trials of one `subject` follow each other: after one that hung the others are left out."""

    @property
    def subject(self) -> str: ...


T = TypeVar("T", bound=Trial)


def try_apart(
    attempt: Callable[[T], Found], trials: Sequence[T], *, num_ranks: int = 1, seconds: float = PATIENCE_SECONDS
) -> Iterator[tuple[T, Found]]:
    """What `attempt(trial)` finds, in order; with several ranks all of them attempt it, and the worst counts.

    `attempt` is a function of a module, as processes have nothing of this one. A trial that gives nothing for so many `seconds`
    has failed, as has one in which the process dies.
    """
    left = list(trials)
    while left:
        with _Processes(attempt, left, num_ranks) as processes:
            for trial in list(left):
                found = processes.find(seconds)
                left.pop(0)
                yield trial, found
                if processes.are_over:
                    break
        if left and processes.hung:
            while left and left[0].subject == trial.subject:
                yield left.pop(0), Found(Verdict.FAILED, f"not tried, as {trial} hung")


class _Processes(Generic[T]):
    """Ranks that work through the same trials."""

    def __init__(self, attempt: Callable[[T], Found], trials: Sequence[T], num_ranks: int) -> None:
        self.hung = False
        self.are_over = False
        self._folder = tempfile.TemporaryDirectory(prefix="pipetrain-trials-")
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        context = forking()
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(theirs, attempt, trials, rank, num_ranks, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
        wait_for_all(self._ends, START_SECONDS)

    def __enter__(self) -> _Processes[T]:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()

    def find(self, seconds: float) -> Found:
        """What all ranks found in the next trial."""
        deadline = time.monotonic() + seconds
        found: dict[Connection, Found] = {}
        while len(found) < len(self._ends):
            waiting = [end for end in self._ends if end not in found]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.hung = self.are_over = True
                found |= {end: Found(Verdict.FAILED, f"hangs: nothing came for {seconds:g} s") for end in waiting}
            for end in ready:
                assert isinstance(end, Connection)
                if (came := self._received(end)) is not None:
                    found[end] = came
        several = list(found.values())
        # An error ends the ranks' pipeline at different places: they begin anew.
        self.are_over |= len(several) > 1 and any(one.result in (Verdict.REFUSED, Verdict.FAILED) for one in several)
        return _told(several)

    def _received(self, end: Connection) -> Found | None:
        """What a process found; None: it has started."""
        try:
            found: Found | None = end.recv()
            return found
        except EOFError:
            process = self._processes[self._ends.index(end)]
            process.join()
            self.are_over = True
            return Found(Verdict.FAILED, f"its process died (exit code {process.exitcode})")


def wait_for_all(ends: Sequence[Connection], seconds: float) -> None:
    """Returns when each end has something to read, or is closed; at the latest after so many `seconds`."""
    deadline = time.monotonic() + seconds
    left = list(ends)
    while left and (ready := wait(left, timeout=max(0.0, deadline - time.monotonic()))):
        left = [end for end in left if end not in ready]


def worst_of(several: Sequence[Found]) -> Found:
    """The first of those that came out worst."""
    return max(several, key=lambda found: list(Verdict).index(found.result))


def _told(several: Sequence[Found]) -> Found:
    """The worst; of refusals the one that is no echo of another rank's."""
    first = [found for found in several if found.result is Verdict.REFUSED and "failed in" not in found.detail]
    if first and all(found.result in (Verdict.REFUSED, Verdict.EQUAL, Verdict.KEPT) for found in several):
        return first[0]
    return worst_of(several)


def _work(
    end: Connection, attempt: Callable[[T], Found], trials: Sequence[T], rank: int, num_ranks: int, folder: str
) -> None:
    os.dup2(2, 1)  # what a layer prints must not come between what the command does
    torch.set_num_threads(1)  # with more, the order of summation is no longer fixed
    gc.collect()
    gc.freeze()  # what is there by now is no activation: whoever looks for those, once per stage, need not look through torch
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        dist.barrier()  # one that left now would close the connections that a slower one is still making
    end.send(None)  # it has started
    for trial in trials:
        end.send(attempt(trial))
    if (parent := parent_process()) is not None:
        wait([parent.sentinel])  # until it is killed: a rank that is not done yet may still need this one
