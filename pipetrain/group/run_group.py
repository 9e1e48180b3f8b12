"""This process among the ranks of the run: its device, and what all ranks have to agree on."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from pipetrain.group.asking import Waits
from pipetrain.group.chain import Chain
from pipetrain.group.failure import FailureBoard, Monitor, PipelineError
from pipetrain.group.world import start_torch_distributed

_T = TypeVar("_T")
# Worlds of one process are numbered, as its pipelines are: a later one must not find the addresses of an earlier.
_numbers = itertools.count()


class World:
    """torch.distributed, from torchrun's variables or for one process alone; closed with the `with` block.

    Ranks agree over a chain of their own, from neighbour to neighbour on the host: what a rank opens does not grow with
    the number of ranks, every wait has its time-out, and none is for a device.

    Raises:
        ValueError: the ranks have different versions of what they run on; the same on every rank.
        PipelineError: another rank could not be met within `timeout_seconds`.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._owns_process_group = False
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _device(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            start_torch_distributed(self.device, self._timeout_seconds)
            self._owns_process_group = True
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = None
        if self.size > 1:
            store = PrefixStore(f"pipetrain/world-{next(_numbers)}", dist.distributed_c10d._get_default_store())
        self._board = FailureBoard(store)
        self._monitor = Monitor(self.rank, self._board, self._timeout_seconds, Waits(store, self.rank, self.size))
        self._chain = Chain(store, self.rank, self.size, self._monitor)
        self._monitor.on_failure = self._chain.abort
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # other ranks may be gone, and saying goodbye to them would hang
            self._board.post(str(error) if isinstance(error, PipelineError) else self._tell(error))
            self._chain.abort()
            return
        self._chain.close()
        if self._owns_process_group:
            dist.destroy_process_group()

    def largest(self, value: int) -> int:
        """The largest `value` of any rank. Collective."""
        with self._naming_a_loss():
            return self._chain.largest(value, "what all ranks agree on")

    def from_first(self, value: _T) -> _T:
        """The `value` of rank 0, of what JSON knows (a tuple becomes a list). Collective."""
        with self._naming_a_loss():
            shared: _T = self._chain.relay({"value": value}, lambda _: None, "what rank 0 says")["value"]
            return shared

    def _tell(self, error: BaseException) -> str:
        line = (str(error).strip().splitlines() or [""])[0]
        return f"rank {self.rank} failed: {type(error).__name__}: {line}"

    @contextlib.contextmanager
    def _naming_a_loss(self) -> Iterator[None]:
        """A rank that dies between two steps breaks the connection of those that want to agree with it."""
        try:
            yield
        except PipelineError as error:
            if not self._monitor.has_lost_a_rank:
                raise
            raise PipelineError(f"rank {self.rank} lost another rank between two steps ({error})") from error


def has_gpus(num_ranks: int) -> bool:
    """Whether each of `num_ranks` ranks of this machine can have a GPU of its own."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks


def _device(local_rank: int, num_local_ranks: int) -> torch.device:
    return torch.device("cuda", local_rank) if has_gpus(num_local_ranks) else torch.device("cpu")
