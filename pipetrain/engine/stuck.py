"""Ends a torchrun that waits for its store over a link that is cut, which it does for as long as TCP tries: a quarter of an hour.

A rank that has failed leaves this behind on a run of several machines. torchrun looks at its ranks every 0.1 s; one that it
has not looked at for seconds is not looking any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

_PATIENCE_SECONDS = 4.0
_LOOK_SECONDS = 0.1


def watch_torchrun() -> None:
    """Leave a process behind that ends torchrun, if it does not see that this rank ends. Nothing under other launchers."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        words = [sys.executable, "-I", "-S", __file__, str(os.getppid()), str(os.getpid())]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def main(torchrun: int, rank: int) -> None:
    """Waits until `torchrun` has seen that its child `rank` has ended; kills it when it does not."""
    ended_at = None
    while (state := _state(rank, torchrun)) is not None:
        now = time.monotonic()
        if state == "Z" and ended_at is None:
            ended_at = now
        if ended_at is not None and now - ended_at > _PATIENCE_SECONDS:
            print(
                f"pipetrain: torchrun (process {torchrun}) waits for its store over a link that seems cut; it has been ended",
                file=sys.stderr,
                flush=True,
            )
            os.kill(torchrun, signal.SIGKILL)
            return
        time.sleep(_LOOK_SECONDS)


def _state(process: int, parent: int) -> str | None:
    """The letter of the kernel for the state of `process`, a child of `parent`; None where there is no such child."""
    try:
        with open(f"/proc/{process}/stat") as file:
            state, of, *_ = file.read().rsplit(") ", 1)[1].split()
    except OSError:
        return None
    return state if int(of) == parent else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
