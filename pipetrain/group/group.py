"""The ranks that work together, as one of them sees them: a run has such a group, and so has each of its pipelines."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from pipetrain.group.address import is_rank
from pipetrain.group.asking import Waits
from pipetrain.group.chain import Chain
from pipetrain.group.coordinates import Grid
from pipetrain.group.failure import FailureBoard, Monitor, PipelineError
from pipetrain.group.own_device import choose_device
from pipetrain.group.torch_distributed import name_of_attempt, start_torch_distributed

_T = TypeVar("_T")

# Groups of the same ranks are numbered: several may live at once, made in the same order on each of these ranks, and a later
# one must not find the addresses of an earlier.
_numbers: Counter[str] = Counter()


class Group:
    """One rank among `size`, which agree over a chain from neighbour to neighbour, wait with a time-out, and fail together.

    What a rank opens does not grow with the number of ranks, and no wait is for a device. `store` is this group's own part of
    the store at which the ranks meet, None for a rank alone; `coordinates` are the rank's in the `grid`. With
    `owns_process_group` torch.distributed was started for this group, and ends with it.

    As a context manager it is closed at the end; an error in the block is told to the other ranks instead.

    Raises:
        PipelineError: a neighbouring rank could not be met within `timeout_seconds`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Store | None,
        timeout_seconds: float,
        *,
        owns_process_group: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.store = store
        self.grid = Grid(stage=size)
        self.coordinates = self.grid.coordinates_of(rank)
        self.board = FailureBoard(store)
        self.monitor = Monitor(rank, self.board, timeout_seconds, Waits(store, rank, size))
        self.chain = Chain(store, rank, size, self.monitor)
        self.monitor.on_failure = self.chain.abort
        self._owns_process_group = owns_process_group

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # other ranks may be gone, and saying goodbye to them would hang
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: the other ranks are told why, and nobody waits for it any more."""
        line = (str(error).strip().splitlines() or [""])[0]
        text = f"rank {self.rank} failed: {type(error).__name__}: {line}"
        self.monitor.fail(str(error) if isinstance(error, PipelineError) else text)

    def close(self) -> None:
        """End the chain, and torch.distributed if it was started for this group."""
        self.chain.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """What is made in the block uses this group; where that fails, the group ends. A ValueError is raised by all ranks, which
        leave in order; any other error is told to those that wait."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, ValueError):
                self.fail(error)
            self.close()
            raise

    # Between two steps --------------------------------------------------------------------------------------------

    def largest(self, value: int) -> int:
        """The largest `value` of any rank. Collective."""
        with self._naming_a_loss():
            return self.chain.largest(value, "what all ranks agree on")

    def from_first(self, value: _T) -> _T:
        """The `value` of rank 0, of what JSON knows (a tuple becomes a list). Collective."""
        with self._naming_a_loss():
            shared: _T = json.loads(self.chain.broadcast(json.dumps(value).encode(), 0, "what rank 0 says"))
            return shared

    @contextlib.contextmanager
    def _naming_a_loss(self) -> Iterator[None]:
        """A rank that dies between two steps breaks the connection of those that want to agree with it."""
        try:
            yield
        except PipelineError as error:
            if not self.monitor.has_lost_a_rank:
                raise
            raise PipelineError(f"rank {self.rank} lost another rank between two steps ({error})") from error


def join_group(
    process_group: Any = None,
    device: torch.device | str | None = None,
    *,
    timeout_seconds: float,
    starts_alone: bool = False,
    shares_gpus: bool = False,
) -> Group:
    """A new group of the ranks of `process_group`, of torch.distributed, of torchrun's variables, or of this one alone.

    Collective over these ranks. torch.distributed is started from torchrun's variables where nobody has; without them only if
    it `starts_alone`, for who uses it beside the group. `device`, `shares_gpus`: see `choose_device`.

    Raises:
        ValueError: this process is not in `process_group`; the ranks have different versions of what they run on.
        PipelineError: another rank could not be met within `timeout_seconds`.
    """
    chosen = choose_device(device, shares_gpus=shares_gpus)
    owns = not dist.is_initialized() and (starts_alone or is_rank())
    if owns:
        start_torch_distributed(chosen, timeout_seconds)
    if not dist.is_initialized():
        return Group(0, 1, chosen, None, timeout_seconds)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in `group`: make the Pipeline on the ranks of the group only")
    members = "" if process_group is None else "-" + "-".join(map(str, dist.get_process_group_ranks(process_group)))
    number, _numbers[members] = _numbers[members], _numbers[members] + 1
    name = f"pipetrain/{name_of_attempt()}/group-{number}{members}"
    store = PrefixStore(name, dist.distributed_c10d._get_default_store()) if size > 1 else None
    return Group(rank, size, chosen, store, timeout_seconds, owns_process_group=owns)
