"""Ends ranks that do not end by themselves once another has failed: torchrun would give a stopped process 30 seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from pipetrain.launcher.outcome import Exit, collect, processes

# From the first failure that a rank has left until the others are killed: what they get to write their own message.
GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.2


@contextlib.contextmanager
def remains_ended(folder: Path) -> Iterator[None]:
    """While it is open, a failed outcome in `folder` ends every rank that has announced itself there."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, over), name="remains", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_at_once(folder: Path) -> None:
    """Kill all ranks that have announced themselves in `folder`; a stopped process cannot hold this up."""
    for process in processes(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)  # torchrun makes each rank the leader of a process group


def _watch(folder: Path, over: threading.Event) -> None:
    while not over.wait(_LOOK_SECONDS):
        if any(outcome.code not in (Exit.DONE, Exit.STOPPED) for outcome in collect(folder)):
            if not over.wait(GRACE_SECONDS):
                end_at_once(folder)
            return
