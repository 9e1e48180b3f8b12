"""The processes of a pipeline: who this one is, and the store through which all meet."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

# Pipelines of one process are numbered: several may live at once, made in the same order on every rank.
_numbers = itertools.count()


@dataclass(frozen=True)
class World:
    """One rank among `num_ranks`. `store` is this pipeline's own part of the store; None for a rank alone."""

    rank: int
    num_ranks: int
    store: Store | None
    device: torch.device
    owns_process_group: bool  # torch.distributed was initialised here, and `leave` undoes it

    def leave(self) -> None:
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def join(group: Any, device: torch.device | str | None, timeout_seconds: float) -> World:
    """The world of a new pipeline: of `group`, of torch.distributed, of torchrun's variables, or of one rank."""
    chosen = choose_device(device)
    number = next(_numbers)
    owns = False
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return World(0, 1, None, chosen, owns_process_group=False)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_seconds)
        place, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = store_of_this_attempt(timeout)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=place, world_size=size)
        owns = True
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in `group`: make the Pipeline on the ranks of the group only")
    members = "" if group is None else "-" + "-".join(map(str, dist.get_process_group_ranks(group)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _on_one_node() else "0"
    name = f"pipetrain/attempt-{attempt}/pipeline-{number}{members}"
    own = PrefixStore(name, dist.distributed_c10d._get_default_store())
    return World(rank, size, own if size > 1 else None, chosen, owns)


def store_of_this_attempt(timeout: timedelta) -> dist.Store:
    """The store of torchrun's variables, without what ranks wrote into it before torchrun started them again.

    On one node torchrun keeps its store over restarts, and the addresses of processes that were killed with it: a new
    rank that finds them first connects to nobody. On several nodes the agents do not count restarts alike, so the number
    cannot be used; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun take a new store.
    """
    store: dist.Store
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if not _on_one_node():
        return store
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _on_one_node() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


def choose_device(device: torch.device | str | None) -> torch.device:
    """`device`, or this rank's GPU where there are enough, or the CPU."""
    if device is not None:
        chosen = torch.device(device)
    else:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        enough = torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        chosen = torch.device("cuda", local) if enough else torch.device("cpu")
    if chosen.type == "cuda":
        # Before CUDA starts: with one hardware queue the streams of the lanes would wait for each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        chosen = torch.device("cuda", chosen.index or 0)
        torch.cuda.set_device(chosen)
    return chosen
