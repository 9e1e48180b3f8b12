"""Stopping on request: a signal asks, the ranks agree between two steps, a second signal ends at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

from pipetrain.launcher.outcome import LAUNCHER_VARIABLE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SLURM sends USR1 before the time is up
# A terminal's Ctrl-C goes to every process of the group, and torchrun forwards its own copy to the ranks: one request.
ONE_REQUEST_SECONDS = 1.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def ending_with_the_launcher() -> Iterator[None]:
    """While it is open the kernel ends this process where whoever started it dies.

    For the time in which ranks look for each other: they would wait for a store that died with torchrun until their time-out,
    and have nothing to save yet.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if not sys.platform.startswith("linux") or launcher is None:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before
        os._exit(128 + signal.SIGKILL)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PDEATHSIG, 0)


class StopRequest:
    """While it is open, SIGINT, SIGTERM and SIGUSR1 are kept in `signum` instead of ending the process.

    A launcher that is gone counts as a request too: nobody is left who would forward one.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._asked_at = 0.0
        self._parent = os.getppid()
        self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    @property
    def signum(self) -> int:
        """The signal that asked to stop; 0: none."""
        return self._signum or (signal.SIGHUP if os.getppid() != self._parent else 0)

    def __enter__(self) -> Self:
        for signum in SIGNALS:
            signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signum and now - self._asked_at > ONE_REQUEST_SECONDS:
            sys.stderr.write("pipetrain: second signal, ending at once\n")
            sys.stderr.flush()
            os._exit(128 + signum)
        if not self._signum:
            self._signum, self._asked_at = signum, now
