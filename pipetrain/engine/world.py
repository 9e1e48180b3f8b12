"""This process among the ranks of the run: its device, and what all ranks have to agree on."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from pipetrain.runtime.failure import PipelineError
from pipetrain.runtime.world import store_of_this_attempt

_T = TypeVar("_T")


class World:
    """torch.distributed, from torchrun's variables or for one process alone; closed with the `with` block.

    CPU tensors go over gloo even where ranks compute on GPUs, so agreeing on something never waits for a device.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _device(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def __enter__(self) -> Self:
        backend = "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        if "RANK" in os.environ:
            store = store_of_this_attempt(self._timeout)
            dist.init_process_group(backend, timeout=self._timeout, store=store, rank=self.rank, world_size=self.size)
        else:
            dist.init_process_group(backend, timeout=self._timeout, store=HashStore(), rank=0, world_size=1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # after an error other ranks may be gone, and saying goodbye to them would hang
            dist.destroy_process_group()

    def largest(self, value: int) -> int:
        """The largest `value` of any rank. Collective."""
        shared = torch.tensor(value)
        with self._naming_a_loss():
            dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def from_first(self, value: _T) -> _T:
        """The `value` of rank 0. Collective."""
        shared = [value]
        with self._naming_a_loss():
            dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
        return shared[0]

    @contextlib.contextmanager
    def _naming_a_loss(self) -> Iterator[None]:
        """A rank that dies between two steps breaks the connection of those that want to agree with it."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rsplit("] ", 1)[-1].split(". ")[0]
            raise PipelineError(
                f"rank {self.rank} lost another rank between two steps ({reason}): it failed, was killed, ran out of memory, "
                "or its machine is down: see its own output"
            ) from error


def has_gpus(num_ranks: int) -> bool:
    """Whether each of `num_ranks` ranks of this machine can have a GPU of its own."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks


def _device(local_rank: int, num_local_ranks: int) -> torch.device:
    return torch.device("cuda", local_rank) if has_gpus(num_local_ranks) else torch.device("cpu")
