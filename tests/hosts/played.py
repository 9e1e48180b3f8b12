"""One rank of a large pipeline, started for real, among ranks of which most are played.

Rank r opens connections to r - 1 and r + 1 alone. Each of these two is a process that holds the other ends of all of them for
real, over gloo, and says on the chain what it and the ranks behind it would have said. The ranks further away are played by
what they would have left in the store when all compare their versions.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import PATIENCE_SECONDS

NUM_MICROBATCHES = 8
WIDTH = 64
_SECONDS = PATIENCE_SECONDS
_CONTEXT = mp.get_context("forkserver")


@dataclass(frozen=True)
class Footprint:
    """What a rank has when it has started, just before its first step."""

    process_groups: int  # that torch.distributed lists
    connections: int  # sockets, of whatever kind
    threads: int
    resident_bytes: int  # of the whole process
    added_bytes: int  # of them, since before the start


def start_one(rank: int, num_ranks: int) -> Footprint:
    """The footprint of one real rank; its neighbours and all others are played."""
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < num_ranks]
    roles: dict[int, tuple[Callable[..., None], int]] = {rank: (_be_real, rank)}
    roles |= dict.fromkeys(neighbours, (_play, rank))
    return _run(roles, num_ranks)[rank]


def start_all(num_ranks: int) -> dict[int, Footprint]:
    """The footprints of all ranks, nobody played."""
    return _run({rank: (_be_real, rank) for rank in range(num_ranks)}, num_ranks)


def use_the_group(num_ranks: int) -> dict[int, tuple[int, int, int]]:
    """Of each rank: sockets before the process group of torch.distributed is used and after, and a sum over all ranks."""
    return _run({rank: (_reduce, rank) for rank in range(num_ranks)}, num_ranks)


def _run(roles: dict[int, tuple[Callable[..., None], int]], num_ranks: int) -> dict[int, Any]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    _play_versions(store, set(range(num_ranks)) - set(roles), with_verdict=0 not in roles)
    processes, connections = [], {}
    for own, (role, of) in roles.items():
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_main, args=(theirs, role, own, of, num_ranks, store.port), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections[own] = ours
    try:
        found = {}
        for own, connection in connections.items():
            assert connection.poll(_SECONDS), f"rank {own} of {num_ranks} did not start in time"
            try:
                found[own] = connection.recv()
            except EOFError as error:
                codes = [process.exitcode for process in processes]
                raise AssertionError(f"rank {own} of {num_ranks} has ended; exit codes of all: {codes}") from error
        for connection in connections.values():
            connection.send("end")
        for process in processes:
            process.join(_SECONDS)
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return {own: footprint for own, footprint in found.items() if footprint is not None}
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _play_versions(store: Any, absent: set[int], *, with_verdict: bool) -> None:
    """What ranks that are not there would have left when all compare their versions; rank 0 reads it."""
    from pipetrain.comm.torch_distributed import own_versions

    prefix = "attempt-0/start-0/pipetrain/versions"
    if with_verdict:
        store.set(f"{prefix}/verdict", "the same")
        return
    for rank in absent:
        store.set(f"{prefix}/rank/{rank}", json.dumps([rank, "elsewhere", own_versions()]))


def _main(
    connection: Connection, role: Callable[..., None], own: int, of: int, num_ranks: int, store_port: int
) -> None:
    import torch

    torch.set_num_threads(1)
    place = {"RANK": str(own), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({**place, **meeting, "GLOO_SOCKET_IFNAME": "lo"})
    role(connection, own, of, num_ranks)


def _layers(num_stages: int) -> list[Any]:
    """A layer per stage, made on the rank that holds it."""
    from torch import nn

    return [lambda: nn.Linear(WIDTH, WIDTH) for _ in range(num_stages)]


def _be_real(connection: Connection, own: int, of: int, num_ranks: int) -> None:
    """What `pipetrain.train` does before its first step."""
    import torch.distributed as dist
    from torch import nn

    from pipetrain.comm.group import join_group
    from pipetrain.runtime.pipeline import Pipeline

    gc.collect()
    before = _resident_bytes()
    with join_group(timeout_seconds=_SECONDS) as group:
        assert (group.rank, group.size) == (own, num_ranks)
        assert group.from_first("the run folder") == "the run folder"
        pipeline = Pipeline(
            _layers(num_ranks),
            nn.functional.mse_loss,
            num_microbatches=NUM_MICROBATCHES,
            device="cpu",
            timeout_seconds=_SECONDS,
        )
        assert group.largest(own) == num_ranks - 1
        gc.collect()
        resident = _resident_bytes()
        connection.send(
            Footprint(
                process_groups=len(dist.distributed_c10d._world.pg_map),
                connections=_num_sockets(),
                threads=len(os.listdir("/proc/self/task")),
                resident_bytes=resident,
                added_bytes=resident - before,
            )
        )
        connection.recv()
        pipeline.close()


def _reduce(connection: Connection, own: int, of: int, num_ranks: int) -> None:
    import torch
    import torch.distributed as dist

    from pipetrain.comm.torch_distributed import start_torch_distributed

    start_torch_distributed(torch.device("cpu"), _SECONDS)
    before = _num_sockets()
    store = dist.distributed_c10d._get_default_store()
    if store.add("counted", 1) == num_ranks:
        store.set("all have counted", "")
    store.wait(["all have counted"])  # whoever used the group before would connect to those that still count
    value = torch.tensor(own)
    dist.all_reduce(value)
    dist.barrier()
    connection.send((before, _num_sockets(), int(value)))
    connection.recv()
    dist.destroy_process_group()


def _play(connection: Connection, own: int, of: int, num_ranks: int) -> None:
    """The neighbour `own` of the real rank `of`, and on the chain all ranks behind it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore

    from pipetrain.comm.chain import Chain, Everyone
    from pipetrain.comm.clocks import align_clocks
    from pipetrain.comm.courier import make_pair
    from pipetrain.comm.failure import FailureBoard, Monitor
    from pipetrain.comm.torch_distributed import start_torch_distributed
    from pipetrain.models.spec import spec_of
    from pipetrain.plan.plan import make_plan
    from pipetrain.runtime.agreement import Introduction, introduce
    from pipetrain.runtime.call_programs import Programs
    from pipetrain.schedule.policy import RecomputePolicy

    start_torch_distributed(torch.device("cpu"), _SECONDS)
    store = dist.distributed_c10d._get_default_store()

    def meet(name: str) -> Chain:
        """A chain that ends at this rank: so it speaks as rank 0 to the one above, or as the last to the one below."""
        part = PrefixStore(name, store)
        monitor = Monitor(own, FailureBoard(part), _SECONDS)
        chain = Chain(None, own, num_ranks, monitor)
        neighbour = chain._meet(part, of, monitor)
        if own < of:
            chain._after = neighbour
        else:
            chain._before = neighbour
        return chain

    agreeing = meet("pipetrain/attempt-0/group-0")
    agreeing.broadcast(json.dumps("the run folder").encode(), 0, "what rank 0 says between two steps")

    name = "pipetrain/attempt-0/group-1"
    chain = meet(name)
    align_clocks(chain)
    plan = make_plan(num_ranks, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    model = json.dumps(spec_of(_layers(num_ranks)).fingerprint, sort_keys=True)
    schedule = Programs("gpipe", RecomputePolicy.of("overlap"), plan, own).describe()
    introduce(
        Introduction(0, model, repr(plan), schedule, carrier="gloo"),
        Everyone(chain, Chain(None, 0, 1, Monitor(own, FailureBoard(None), _SECONDS))),
        own,
    )
    edge = min(own, of)
    monitor = Monitor(own, FailureBoard(None), _SECONDS)
    pairs = [
        make_pair(PrefixStore(name, store), f"edge/{edge}/{direction}", int(own > of), f"rank {of}", monitor)
        for direction in "FB"
    ]
    chain.concatenate(b"0", "that all ranks are connected")
    agreeing.concatenate(b"%d" % (num_ranks - 1 if own > of else 0), "what all ranks agree on between two steps")
    connection.send(None)
    connection.recv()
    assert len(pairs) == 2
    for each in (chain, agreeing):
        each.close()


def _num_sockets() -> int:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # the one that lists this folder
            continue
    return sum(link.startswith("socket:") for link in links)


def _resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
