"""What all ranks agree on when a pipeline is made: that they were given the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pipetrain.group.chain import Chain


@dataclass
class Introduction:
    """What each rank tells the others when a pipeline is made; with a `problem` the rest says nothing."""

    seed: int = 0
    model: str = ""  # its fingerprint
    plan: str = ""
    schedule: str = ""
    counts: bool = False  # whether it was given a count_fn
    carrier: str = ""  # of messages between stages
    gpu: str = ""  # its own, where it must have it for itself
    problem: str = ""


@contextmanager
def introduced(chain: Chain) -> Iterator[Introduction]:
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
        introduce(own, chain)
    except ValueError as agreed:
        raise agreed from problem


def introduce(own: Introduction, chain: Chain) -> None:
    """Compare with rank 0, whose introduction goes down the chain; what the last rank then knows comes back. Collective.

    Raises:
        ValueError: the first rank's problem, if there is one; or a rank that was given something else than rank 0. The same
            on every rank.
    """
    what = "the other ranks' plans"

    def compare(received: bytes | None) -> bytes:
        header: dict[str, Any] = (
            {"first": asdict(own), "gpus": {}, "error": ""} if received is None else json.loads(received)
        )
        error = _mistake(chain.rank, own, Introduction(**header["first"]))
        if own.gpu:
            rank = header["gpus"].setdefault(own.gpu, chain.rank)
            error = error or (_shared(own.gpu, rank, chain.rank) if rank != chain.rank else "")
        header["error"] = header["error"] or error
        return json.dumps(header).encode()

    known = json.loads(chain.down(compare, what))
    if error := chain.broadcast(known["error"].encode(), chain.num_ranks - 1, what).decode():
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
    for key in ("model", "plan", "schedule", "seed"):
        mine, theirs = getattr(own, key), getattr(first, key)
        if mine != theirs:
            return f"rank {rank} was given another {key} than rank 0: {mine}, not {theirs}"
    return ""


def _shared(gpu: str, one: int, other: int) -> str:
    return (
        f"ranks {one} and {other} are both on {gpu}, and NCCL connects no two ranks of one GPU: start no more ranks on a machine than "
        "it has GPUs, or use transport.edges=pinned (make_plan(..., edges='pinned'))"
    )
