"""Memory of the host near a GPU: on machines with several NUMA nodes a copy to another node's memory was three times as slow
(120 against 350 GB/s: pytorch/torchtitan, issue 3489).

Linux gives a page to the node of the core that first touches it. So pinned memory is taken by a thread that may run on the cores
of the GPU's node alone, as long as that takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

SYSTEM = Path("/sys")


def cores_of_node(pci_address: str, system: Path = SYSTEM) -> frozenset[int]:
    """The cores of the NUMA node to which the device at `pci_address` (as in `0000:1b:00.0`) is attached; none where the machine has no nodes,
    or does not tell."""
    with suppress(OSError, ValueError):
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        if node >= 0:
            return _cores((system / f"devices/system/node/node{node}/cpulist").read_text())
    return frozenset()


def _cores(text: str) -> frozenset[int]:
    """Of a list such as `0-3,8-11`."""
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Within it this thread runs on those of `cores` on which it may run; on all of its own if there are none."""
    own = os.sched_getaffinity(0)
    if not cores & own:
        yield
        return
    os.sched_setaffinity(0, cores & own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
