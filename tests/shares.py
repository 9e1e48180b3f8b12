"""What one run of CI tries of a long table: every n-th row, from one that the commit chooses.

A commit's rows are the same again wherever it is tried; over some commits, all rows are. That every row can be tried is
looked at each time, and `make test-full` and `make mutants` try them all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")
ROOT = Path(__file__).resolve().parents[1]


def share_of(rows: Sequence[Row], num_shares: int, commit: str) -> list[Row]:
    """Every `num_shares`-th of the rows, from the one that the digits of `commit` say.

    Raises:
        ValueError: there is no such share.
    """
    if num_shares < 1:
        raise ValueError(f"a share of {num_shares} is none; 1 is all of them, 3 every third")
    return list(rows[int(commit, 16) % num_shares :: num_shares])


def this_commit() -> str:
    """In hexadecimal digits."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip()
