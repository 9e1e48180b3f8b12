"""Another process that has a run folder."""

import pathlib
import subprocess
import sys

_CLAIM = """
import sys
from pathlib import Path
from pipetrain.monitor.claim import claimed
with claimed(Path(sys.argv[1]), again=False):
    print("claimed", flush=True)
    sys.stdin.readline()
"""


def claim_elsewhere(folder: pathlib.Path) -> subprocess.Popen[str]:
    """A process that holds the claim until it reads a line, or is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLAIM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process
