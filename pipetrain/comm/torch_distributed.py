"""torch.distributed from torchrun's variables: the store at which all ranks meet, a process group that connects on use, and meshes.

All ranks have the same software: it is compared over the store before anything else, and told in a line. Each rank writes its
versions and waits for the verdict of rank 0, which reads them all at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.comm.address import (
    STORE_VARIABLE,
    Unreachable,
    explain_unreachable,
    interface_to,
    is_rank,
    listener_at,
    wait_for,
)
from pipetrain.comm.coordinates import REPLICA_STAGE, STAGE_REPLICA, Grid
from pipetrain.comm.courier import closing_ports, connecting_on_use
from pipetrain.comm.failure import PipelineError

Versions = Mapping[str, str]
_PACKAGE = __name__.partition(".")[0]
_SAME = "the same"
# Ranks that have not come, by number, in the message of those that wait for them.
_MOST_NAMED = 8
# How long a failed rank stays until the others have read why: all have come, and need only read it.
_STAYS = timedelta(seconds=30)
REPLICA, STAGE, TENSOR = "replica", "stage", "tensor"
_STARTS = itertools.count()  # of torch.distributed in this process: all ranks count alike


def start_torch_distributed(device: torch.device, timeout_seconds: float, *, is_used: bool | None = None) -> None:
    """Initialise torch.distributed from torchrun's variables, or for this process alone where there are none.

    On one machine its process group connects every rank with every other, and closes its port. So it does over machines
    if it `is_used`; if not, nobody ever connects there. Where that is not known, two ranks connect when they first talk: what a rank opens
    must not grow with their number.

    Raises:
        ValueError: the ranks have different versions of what they run on.
        PipelineError: the other ranks could not be met within `timeout_seconds`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store: Store
    if is_rank():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _choose_interface()
        # Addresses of an earlier group of this process lead nowhere: its ports are closed.
        store = PrefixStore(f"start-{next(_STARTS)}", store_of_this_attempt(timeout))
        check_same(store, rank, size)
    else:
        rank, size, store = 0, 1, HashStore()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    with contextlib.ExitStack() as stack:
        if not is_on_one_machine() and not is_used:
            stack.enter_context(connecting_on_use())
        if is_on_one_machine() or is_used is not None:
            stack.enter_context(closing_ports())
        try:
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        except RuntimeError as error:
            missing = (
                f"rank {rank} could not connect to every other rank within {timeout_seconds:g} s (timeout_seconds)"
            )
            raise PipelineError(f"{missing}: one of them has ended, see its own output ({error})") from error


def _choose_interface() -> None:
    """Gloo and NCCL listen and connect where the ranks meet, unless the user has named an interface."""
    found = interface_to("127.0.0.1" if STORE_VARIABLE in os.environ else os.environ.get("MASTER_ADDR", ""))
    if found is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", found[0])


def all_gather_bytes(own: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    """What each rank of a gloo group gives, on every rank; nothing is unpickled. Collective."""
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = max(int(length) for length in lengths)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(parts, torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8), group=group)
    return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths)]


def is_on_one_machine() -> bool:
    """Whether all ranks are, as far as their launcher says."""
    size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", "1" if size == "1" else "") == size


def store_of_this_attempt(timeout: timedelta) -> Store:
    """The store of torchrun's variables, without what ranks wrote into it before torchrun started them again.

    On one node torchrun keeps its store over restarts, and the addresses of processes that were killed with it: a new
    rank that finds them first connects to nobody. On several nodes the agents do not count restarts alike, so the number
    cannot be used; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun take a new store.

    Raises PipelineError: there is no store at MASTER_ADDR and MASTER_PORT.
    """
    store = _store(timeout)
    return PrefixStore(name_of_attempt(), store) if _on_one_node() else store


def name_of_attempt() -> str:
    """Which start of torchrun's this is, as far as all ranks count alike."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if _on_one_node() else '0'}"


def _store(timeout: timedelta) -> Store:
    """Raises:
    ValueError: who started the ranks did not say where they meet.
    PipelineError: the address is taken, cannot be reached, or not all ranks came to it.
    """
    if (file := os.environ.get(STORE_VARIABLE)) is not None:
        shared = FileStore(file, int(os.environ["WORLD_SIZE"]))
        shared.set_timeout(timeout)
        return shared
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK is set and {missing[0]} is not: start the ranks with torchrun, or set it to where rank 0 is"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_it = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store: Store
    start = time.monotonic()
    try:
        if hosts_it:
            listener = listener_at(host, port)
            descriptor = None if listener is None else listener.detach()
            store = TCPStore(
                host, port, int(os.environ["WORLD_SIZE"]), True, timeout, multi_tenant=True, master_listen_fd=descriptor
            )
        else:
            wait_for(host, port, timeout.total_seconds())
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except Unreachable as error:
        raise PipelineError(f"rank {os.environ['RANK']}: {error}") from error
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        told = explain_unreachable(host, port, time.monotonic() - start, ConnectionError(reason))
        raise PipelineError(f"rank {os.environ['RANK']}: {told}") from error
    return store


def _on_one_node() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


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


def check_mesh(mesh: object) -> DeviceMesh:
    """`mesh`, if it is one that a pipeline can have.

    Raises ValueError: it has other dimensions, more than one part of a tensor, or ranks that do not count up.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={mesh!r}: give a DeviceMesh with the dimensions 'replica' and 'stage', as init_device_mesh(device_type, "
            "(num_replicas, num_ranks), mesh_dim_names=('replica', 'stage')) makes it"
        )
    names = mesh.mesh_dim_names or ()
    if not {REPLICA, STAGE} <= set(names) <= {REPLICA, STAGE, TENSOR}:
        raise ValueError(
            f"mesh has the dimensions {list(names)}: 'replica' and 'stage' are needed, and 'tensor' is allowed with 1 rank; name them by "
            "init_device_mesh(..., mesh_dim_names=('replica', 'stage'))"
        )
    if TENSOR in names and mesh.size(names.index(TENSOR)) != 1:
        raise ValueError(
            f"mesh has {mesh.size(names.index(TENSOR))} ranks along 'tensor': only 1 is supported so far; give the slice "
            "mesh['replica', 'stage']"
        )
    ranks = ranks_of(mesh)
    if ranks != sorted(ranks):
        raise ValueError(
            f"mesh has the ranks {mesh.mesh.tolist()}, which do not count up along its dimensions: make it with init_device_mesh, with "
            "the dimension last whose ranks are to be neighbours"
        )
    return mesh


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """All its ranks, row by row."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """The grid of a mesh that `check_mesh` has passed."""
    names = mesh.mesh_dim_names or ()
    order = REPLICA_STAGE if names.index(REPLICA) < names.index(STAGE) else STAGE_REPLICA
    return Grid(mesh.size(names.index(REPLICA)), mesh.size(names.index(STAGE)), order=order)


def make_mesh(grid: Grid, rank: int, members: list[int], device_type: str, timeout_seconds: float) -> DeviceMesh:
    """A mesh of `grid`, in which torch.distributed knows rank r as `members[r]`. Collective.

    Its groups connect as that of `start_torch_distributed` does, and are made by their own ranks alone: the other ranks of
    torch.distributed need not come.
    """
    groups = [_group_of(grid.ranks_of_stage(rank), members, timeout_seconds)]
    groups += [_group_of(grid.ranks_of_replica(rank), members, timeout_seconds)]
    rows = [[members[one] for one in grid.ranks_of_replica(first)] for first in grid.ranks_of_stage(0)]
    names = (REPLICA, STAGE)
    if grid.order == STAGE_REPLICA:
        groups, rows, names = groups[::-1], [list(row) for row in zip(*rows)], names[::-1]
    return DeviceMesh.from_group(groups, device_type, rows, mesh_dim_names=names)


def _group_of(ranks: tuple[int, ...], members: list[int], timeout_seconds: float) -> ProcessGroup:
    timeout = timedelta(seconds=timeout_seconds)
    with closing_ports() if is_on_one_machine() else connecting_on_use():
        made: ProcessGroup = dist.new_group(
            [members[rank] for rank in ranks], timeout=timeout, use_local_synchronization=True
        )
    return made
