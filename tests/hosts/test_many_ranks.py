"""What a rank opens does not grow with the number of ranks: those of twelve start as those of four do."""

import gc
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import links_of
from ranks import NEVER_SECONDS, run_ranks
from torch import nn
from torch.distributed import TCPStore

from pipetrain.comm.group import join_group
from pipetrain.comm.torch_distributed import start_torch_distributed
from pipetrain.runtime.pipeline import Pipeline

FEW, MANY, WIDTH = 4, 12, 64
MOST_MORE = 1_000_000  # bytes, for eight more ranks: some 30 kB for each, and what varies from process to process


def meet(port: int) -> int:
    """Leaves the group of the tests and says where to meet for another; returns this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    meeting = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = True  # no rank hosts the store, which knows all of them
    os.environ |= {name: str(value) for name, value in meeting.items()}
    return rank


def a_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def num_sockets() -> int:
    return sum(link.startswith("socket:") for link in links_of(os.getpid()))


def resident_bytes() -> int:
    gc.collect()
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def footprint(port: int) -> tuple[tuple[int, int, int], int]:
    """What a rank has just before its first step: process groups that torch lists, sockets and threads; and bytes since the start."""
    rank, before = meet(port), resident_bytes()
    with join_group(timeout_seconds=NEVER_SECONDS) as group:
        assert group.from_first("the run folder") == "the run folder"
        layers = [lambda: nn.Linear(WIDTH, WIDTH) for _ in range(group.size)]
        pipeline = Pipeline(
            layers, nn.functional.mse_loss, num_microbatches=8, device="cpu", timeout_seconds=NEVER_SECONDS
        )
        assert group.largest(rank) == group.size - 1
        added = resident_bytes() - before
        threads = len(os.listdir("/proc/self/task"))
        opened = len(dist.distributed_c10d._world.pg_map), num_sockets(), threads
        group.largest(rank)  # nobody leaves before all have counted
        pipeline.close()
    return opened, added


@pytest.mark.parametrize("at", [0, 2, -1], ids=["first", "middle", "last"])
def test_a_rank_of_many_has_what_a_rank_of_four_has(
    at: int, footprints: list[list[tuple[tuple[int, int, int], int]]]
) -> None:
    (few, of_few), (many, of_many) = (ranks[at] for ranks in footprints)
    assert many == few
    assert of_many <= of_few + MOST_MORE


@pytest.fixture(scope="module")
def footprints() -> list[list[tuple[tuple[int, int, int], int]]]:
    return [run_ranks(number, footprint, store.port) for number in (FEW, MANY) for store in [a_store()]]


def use_the_group(port: int) -> tuple[int, int, int]:
    """Sockets before the process group of torch.distributed is used and after, and a sum over all ranks."""
    rank = meet(port)
    start_torch_distributed(torch.device("cpu"), NEVER_SECONDS)
    before = num_sockets()
    store = dist.distributed_c10d._get_default_store()
    if store.add("counted", 1) == dist.get_world_size():
        store.set("all have counted", "")
    store.wait(["all have counted"])  # whoever used the group before would connect to those that still count
    value = torch.tensor(rank)
    dist.all_reduce(value)
    dist.barrier()
    return before, num_sockets(), int(value)


def test_the_process_group_connects_when_it_is_used() -> None:
    """For who uses torch.distributed beside the pipeline."""
    store = a_store()
    for before, after, total in run_ranks(3, use_the_group, store.port):
        assert total == 0 + 1 + 2
        assert after > before
