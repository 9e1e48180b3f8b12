"""What all ranks agree on when a pipeline is made: that they were given the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pipetrain.comm.chain import Everyone
from pipetrain.comm.group import Group
from pipetrain.comm.own_device import identity_of
from pipetrain.comm.transport import NCCL, carrier_of
from pipetrain.plan.plan import Plan


@dataclass
class Introduction:
    """What each rank tells the others when a pipeline is made; with a `problem` the rest says nothing."""

    seed: int = 0
    model: str = ""  # its fingerprint
    plan: str = ""
    schedule: str = ""
    counts: bool = False  # whether it was given a count_fn
    loss_reduction: str = "mean"
    carrier: str = ""  # of messages between stages
    gpu: str = ""  # its own, where it must have it for itself
    problem: str = ""

    def tell(self, plan: Plan, schedule: str, group: Group) -> None:
        """What this rank runs; `schedule` as `Programs.describe` gives it."""
        self.plan, self.schedule = repr(plan), schedule
        if group.size > 1:
            self.carrier = carrier_of(plan.edges, group.device)
            self.gpu = identity_of(group.device) if self.carrier == NCCL else ""


@contextmanager
def introduced(group: Group) -> Iterator[Introduction]:
    """In the block a rank makes its own part and fills in its introduction; then it compares with the other ranks. Collective.

    Raises:
        ValueError: what was wrong (ValueError, TypeError) on a rank, the first one of them; or a rank that was given something
            else than rank 0. The same on every rank.
    """
    own, problem = Introduction(), None
    try:
        yield own
    except (ValueError, TypeError) as error:
        own.problem, problem = str(error), error
    try:
        introduce(own, group.everyone, group.rank)
    except ValueError as agreed:
        raise agreed from problem


def introduce(own: Introduction, everyone: Everyone, own_rank: int) -> None:
    """Compare with rank 0, whose introduction goes down to all; what the last rank of each replica then knows comes back. Collective.

    Raises:
        ValueError: the first rank's problem, if there is one; or a rank that was given something else than rank 0. The same
            on every rank.
    """
    what = "the other ranks' plans"

    def compare(received: bytes | None) -> bytes:
        header: dict[str, Any] = (
            {"first": asdict(own), "gpus": {}, "error": ""} if received is None else json.loads(received)
        )
        error = _mistake(own_rank, own, Introduction(**header["first"]))
        if own.gpu:
            rank = header["gpus"].setdefault(own.gpu, own_rank)
            error = error or (_shared(own.gpu, rank, own_rank) if rank != own_rank else "")
        header["error"] = header["error"] or error
        return json.dumps(header).encode()

    known = json.loads(everyone.down(compare, what))
    chain, several = everyone.chain, everyone.replicas.num_ranks > 1
    part = {key: known[key] for key in ("error", *(("gpus",) if several else ()))}
    of_replica = chain.broadcast(json.dumps(part).encode(), chain.num_ranks - 1, what)
    of_all = [json.loads(one) for one in everyone.replicas.concatenate(of_replica, what)]
    gpus: dict[str, int] = {}
    for found in of_all:
        for gpu, rank in found.get("gpus", {}).items():
            other = gpus.setdefault(gpu, rank)
            found["error"] = found["error"] or (_shared(gpu, other, rank) if other != rank else "")
    if error := next((found["error"] for found in of_all if found["error"]), ""):
        raise ValueError(error)


def _mistake(rank: int, own: Introduction, first: Introduction) -> str:
    if own.problem:
        return own.problem
    if own.counts != first.counts:
        here, there = ("a count_fn", "none") if own.counts else ("no count_fn", "one")
        return f"rank {rank} was given {here}, rank 0 {there}: give every rank the same loss_fn and count_fn"
    if own.carrier != first.carrier:
        return (
            f"messages between stages go over {own.carrier} on rank {rank} and over {first.carrier} on rank 0, as one has a GPU and the "
            "other none: start as many ranks on each machine as it has GPUs, or say device='cpu' on every rank"
        )
    for key in ("model", "plan", "schedule", "seed", "loss_reduction"):
        mine, theirs = getattr(own, key), getattr(first, key)
        if mine != theirs:
            return f"rank {rank} was given another {key} than rank 0: {mine}, not {theirs}"
    return ""


def _shared(gpu: str, one: int, other: int) -> str:
    return (
        f"ranks {one} and {other} are both on {gpu}, and NCCL connects no two ranks of one GPU: start no more ranks on a machine than "
        "it has GPUs, or use transport.backend=pinned (make_plan(..., edges='pinned'))"
    )
