"""Keeps the processors of a virtual machine awake while others sleep on them.

A host that is short of processors gives one that had halted back late: with two, and eight processes that sleep some hundred times a
step, a step took twice its time, and 40 % of it was the host's (`stolen.py`). What spins here has the policy SCHED_IDLE (sched(7)): it
runs where nothing else of this machine wants to, and gives way at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def awake() -> Iterator[None]:
    """Within, a process per processor spins when there is nothing else to do; where there is no SCHED_IDLE, nothing does."""
    count = (os.cpu_count() or 1) if hasattr(os, "SCHED_IDLE") else 0
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
