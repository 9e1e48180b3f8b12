"""How much of its host's memory a rank may use for offloaded sets (`recompute.host_bytes`)."""

from __future__ import annotations

import os
from pathlib import Path


def default_limit(ranks_here: int) -> int:
    """A third of the host memory that is free now, shared by so many ranks of this machine."""
    return _meminfo("MemAvailable") // 3 // ranks_here


def checked_limit(limit: int | None) -> int:
    """The bytes of host memory that a rank may use.

    Raises:
        ValueError: this machine has less memory.
    """
    if limit is None:
        return default_limit(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if limit > (total := _meminfo("MemTotal")):
        raise ValueError(
            f"recompute.host_bytes={limit}: this machine has {total} bytes of memory; use fewer, or leave recompute.host_bytes out (a third "
            "of what is free, for all ranks of the machine)"
        )
    return limit


def _meminfo(key: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
