"""A communicator of two ranks over gloo, for messages of the host: what the chain and the stage edges on a CPU are made of."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store, Work

from pipetrain.group.failure import PipelineError

_TAG_NOBODY_SENDS = 1


class Pair(Protocol):
    """A communicator of two ranks, 0 and 1."""

    def send(self, tensors: list[Tensor], target: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work: ...
    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Work: ...


def make_pair(store: Store, name: str, place: int, timeout_seconds: float) -> Pair:
    """A communicator of two ranks. `name` is unique and the same on both; `place` is 0 on one and 1 on the other.

    Raises:
        PipelineError: the other rank did not come.
    """
    try:
        pair: Pair = ProcessGroupGloo(PrefixStore(name, store), place, 2, timedelta(seconds=timeout_seconds))  # type: ignore[assignment]
    except RuntimeError as error:
        raise PipelineError(
            f"no connection for {name} within {timeout_seconds:g} s (timeout_seconds): the other rank did not start, or its "
            f"address cannot be reached from here (GLOO_SOCKET_IFNAME chooses the interface): {error}"
        ) from error
    return pair


def break_off(pair: Pair, other: int) -> None:
    """Close the connection under whoever waits on it, here and at the other end.

    A thread that is inside a gloo wait when the interpreter ends would bring the process down with it, and the other rank
    should not have to wait for this process to end. A receive that times out closes its pair: so one is made to.
    """
    with suppress(RuntimeError):
        pair.recv([torch.empty(1)], other, _TAG_NOBODY_SENDS).wait(timedelta(milliseconds=1))
