"""A thread that waits, so that the thread that computes need not."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Work

from pipetrain.comm.failure import Monitor

# How long a transfer itself may take. Whoever needs its result times out much earlier and says so; this only has to be
# long, because a gloo wait that times out breaks the connection.
FOREVER = timedelta(days=7)

Job = Callable[[], Callable[[], None]]
Transfer = Callable[[], Work | None]


class Courier:
    """Runs jobs one after the other in a thread of its own. A job transfers, and returns what publishes its result.

    `peer` is what the other rank is called, or says so when it is asked.
    """

    def __init__(self, name: str, peer: str | Callable[[], str], monitor: Monitor) -> None:
        self._peer = peer
        self._monitor = monitor
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._num_given = self._num_ended = 0  # each counted by one thread alone
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def peer(self) -> str:
        """The rank at the other end, in messages."""
        return self._peer if isinstance(self._peer, str) else self._peer()

    def submit(self, what: str, job: Job) -> None:
        self._num_given += 1
        self._jobs.put((what, job))

    def begun(self, transfer: Transfer) -> Transfer:
        """`transfer`, for the job that is submitted next; begun at once if all before it have ended, so that their order stays.

        The message then leaves before this courier's thread has woken, which takes longer than a short one is on its way.
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
                self._monitor.lost(what, self.peer, error)
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
