"""The same software on every machine: compared over the store before anything else, and told in a line.

Each rank writes its versions and waits for the verdict of rank 0, which reads them all at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from pipetrain.comm.failure import PipelineError

Versions = Mapping[str, str]
_PACKAGE = __name__.partition(".")[0]
_SAME = "the same"
# Ranks that have not come, by number, in the message of those that wait for them.
_MOST_NAMED = 8
# How long a failed rank stays until the others have read why: all have come, and need only read it.
_STAYS = timedelta(seconds=30)


def own_versions() -> Versions:
    """What must be equal for ranks to work together, by name."""
    found = {
        "python": platform.python_version(),  # in full: data=stdlib trains on its library
        "torch": torch.__version__,
        "pipetrain": f"{vars(sys.modules[_PACKAGE])['__version__']} (sources {_digest_of_sources()})",
    }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


@functools.cache
def _digest_of_sources() -> str:
    """Two checkouts have the same version and may still differ."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def check_same(store: Store, rank: int, num_ranks: int, own: Versions | None = None) -> None:
    """Compare with the versions of all ranks; waits for them as long as the time-out of `store`. Collective.

    Raises:
        ValueError: they differ; the same text on every rank, with what each machine has.
        PipelineError: not all ranks came in time.
    """
    if num_ranks == 1:
        return
    timeout_seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
    store = PrefixStore("pipetrain/versions", store)
    store.set(f"rank/{rank}", json.dumps([rank, socket.gethostname(), dict(own_versions() if own is None else own)]))
    try:
        if rank == 0:
            found = store.multi_get([f"rank/{other}" for other in range(num_ranks)])
            store.set("verdict", _difference(list(map(json.loads, found))) or _SAME)
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise PipelineError(_missing(store, rank, num_ranks, timeout_seconds)) from error
    if verdict != _SAME:
        # The store lives in rank 0, or in a torchrun that ends with its ranks: nobody leaves before all have read.
        with contextlib.suppress(RuntimeError):  # a rank that is gone reads nothing; this one knows what to say
            if store.add("read", 1) == num_ranks:
                store.set("read by all", "")
            store.wait(["read by all"], _STAYS)
        raise ValueError(verdict)


def _difference(found: list[tuple[int, str, Versions]]) -> str:
    """What differs between the ranks; empty: nothing."""
    names = sorted({name for _, _, theirs in found for name in theirs})
    differing = [name for name in names if len({theirs.get(name) for _, _, theirs in found}) > 1]
    if not differing:
        return ""
    ranks: dict[str, int] = {}  # what a machine has -> a rank there
    for rank, host, theirs in found:
        has = ", ".join(f"{name} {theirs.get(name, 'none')}" for name in differing)
        ranks.setdefault(f"{host} has {has}", rank)
    told = "; ".join(f"{has} (rank {rank})" for has, rank in ranks.items())
    return f"the machines of this run have different versions: {told}; install the same on all"


def _missing(store: Store, rank: int, num_ranks: int, timeout_seconds: float) -> str:
    try:
        missing = [other for other in range(num_ranks) if not store.check([f"rank/{other}"])]
    except RuntimeError:
        return f"rank {rank} lost the store at which the ranks meet: rank 0's machine, or torchrun there, has ended"
    named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
    return (
        f"{len(missing)} of {num_ranks} ranks did not come within {timeout_seconds:g} s (timeout_seconds): rank {named}; see "
        "their own output, and whether their machines have started"
    )
