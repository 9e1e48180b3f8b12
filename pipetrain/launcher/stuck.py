"""Ends a torchrun that waits for its store over a link that is cut, which it does for as long as TCP tries: a quarter of an hour.

A rank that has failed leaves this behind on a run of several machines. torchrun looks at its ranks every 0.1 s, or waits for them
to end; when all have ended and it has not taken note of this one for seconds, it does not look any more.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import time

_PATIENCE_SECONDS = 4.0
_LOOK_SECONDS = 0.1


def watch_torchrun(message: str) -> None:
    """Leave a process behind that ends torchrun, if it does not see that this rank ends. Nothing under other launchers.

    It then says `message`, which a launcher that is ended so can no longer say.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        words = [sys.executable, "-I", "-S", __file__, str(os.getppid()), str(os.getpid()), message]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def main(torchrun: int, rank: int, message: str = "") -> None:
    """Waits until `torchrun` has seen that its child `rank` has ended; kills it when it does not."""
    all_ended_at = None
    while rank in (children := _children(torchrun)):
        now = time.monotonic()
        if any(_is_running(child) for child in children):
            all_ended_at = None
        elif all_ended_at is None:
            all_ended_at = now
        elif now - all_ended_at > _PATIENCE_SECONDS:
            told = f"torchrun (process {torchrun}) waits for its store over a link that seems cut; it has been ended"
            for text in filter(None, (told, message)):
                print(f"pipetrain: {text}", file=sys.stderr, flush=True)
            os.kill(torchrun, signal.SIGKILL)
            return
        time.sleep(_LOOK_SECONDS)


def _children(process: int) -> set[int]:
    """Those that run, and those that have ended without `process` taking note."""
    found = set()
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found |= set(map(int, file.read().split()))
    return found


def _is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
