"""The ranks that work together, as one of them sees them: a run has such a group, and so has each of its pipelines."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.comm.address import is_rank
from pipetrain.comm.chain import Chain, Everyone
from pipetrain.comm.coordinates import REPLICA_STAGE, Grid, Names, grid_of
from pipetrain.comm.device import choose_device
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError
from pipetrain.comm.torch_distributed import (
    check_mesh,
    grid_of_mesh,
    make_mesh,
    name_of_attempt,
    ranks_of,
    start_torch_distributed,
)

_T = TypeVar("_T")

# Groups of the same ranks are numbered: several may live at once, made in the same order on each of these ranks, and a later
# one must not find the addresses of an earlier.
_numbers: Counter[str] = Counter()


class Group:
    """One rank among `size`, which agree over chains from neighbour to neighbour, wait with a time-out, and fail together.

    `store` is this group's part of the store at which the ranks meet, None for a rank alone; `coordinates` are the rank's in the
    `grid`. `chain` are the ranks of its replica, `replicas` those at its place in each replica, `everyone` all. `mesh` is the user's
    mesh, `members` are the ranks of torch.distributed, which ends with the group if that `owns_process_group`.

    As a context manager it closes at the end of the block; after an error in the block it sends that to the other ranks instead.

    Raises PipelineError: a neighbouring rank could not be met within `timeout_seconds`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Store | None,
        timeout_seconds: float,
        *,
        grid: Grid | None = None,
        mesh: DeviceMesh | None = None,
        members: list[int] | None = None,
        owns_process_group: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.store = store
        self.grid = Grid(stage=size) if grid is None else grid
        self.coordinates = self.grid.coordinates_of(rank)
        self.names = Names(self.grid)
        self.board = FailureBoard(store, rank, size, self.names)
        self.monitor = Monitor(rank, self.board, timeout_seconds, self.names)
        self.chain = self._chain_of(self.grid.ranks_of_replica(rank), f"replica/{self.coordinates.replica}")
        self.replicas = self._chain_of(self.grid.ranks_of_stage(rank), f"place/{self.coordinates.stage}")
        self.everyone = Everyone(self.chain, self.replicas)
        self.monitor.on_failure = self.everyone.abort
        self._mesh = mesh
        self._members = list(range(size)) if members is None else members
        self._owns_process_group = owns_process_group

    def _chain_of(self, ranks: tuple[int, ...], name: str) -> Chain:
        """All ranks meet along their replicas first, so none waits in a ring."""
        store = self.store if len(ranks) > 1 else None
        if store is not None and self.grid.replica > 1:
            store = PrefixStore(name, store)
        return Chain(store, ranks.index(self.rank), len(ranks), self.monitor, ranks)

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
        text = f"{self.monitor.name} failed: {type(error).__name__}: {line}"
        self.monitor.fail(str(error) if isinstance(error, PipelineError) else text)

    def close(self) -> None:
        """End the chains, and torch.distributed if it was started for this group."""
        self.everyone.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """The block makes what uses this group; if it fails, the group closes. All ranks raise a ValueError, so they only close; any other
        error is sent to the ranks that wait.

        It ends when all ranks have made it: who dies later was connected with all its neighbours, and they know what they have lost.
        """
        try:
            yield
            self.everyone.largest(0, "that all ranks are connected")
        except BaseException as error:
            if not isinstance(error, ValueError):
                self.fail(error)
            self.close()
            raise

    # Between two steps --------------------------------------------------------------------------------------------

    def largest(self, value: int) -> int:
        """The largest `value` of any rank. Collective."""
        return self.everyone.largest(value, "what all ranks agree on between two steps")

    def from_first(self, value: _T) -> _T:
        """The `value` of rank 0, of what JSON knows (a tuple becomes a list). Collective."""
        shared: _T = json.loads(
            self.everyone.broadcast(json.dumps(value).encode(), "what rank 0 says between two steps")
        )
        return shared

    # For libraries of torch.distributed ---------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """The grid as torch.distributed knows it, with the dimensions `replica` and `stage`. Made when it is first asked for, which is
        collective.

        Raises RuntimeError: torch.distributed was not initialised, as for a rank alone.
        """
        if self._mesh is None:
            if not dist.is_initialized():
                raise RuntimeError("a rank alone has no mesh: initialise torch.distributed, as torchrun's variables do")
            self._mesh = make_mesh(self.grid, self.rank, self._members, self.device.type, self.monitor.timeout_seconds)
        return self._mesh

    def replica_process_group(self) -> ProcessGroup | None:
        """The ranks that stand where this one does in each replica, in their order, as a process group; None with one replica. Collective
        the first time."""
        if self.grid.replica == 1:
            return None
        group: ProcessGroup = self.mesh.get_group("replica")
        return group


def made_by_first(make: Callable[[], _T], group: Group) -> _T:
    """Return on every rank what `make` returns on rank 0, which JSON knows. Collective. Raises ValueError, on every rank: `make` did."""
    made, problem = None, ""
    if group.rank == 0:
        try:
            made = make()
        except ValueError as error:
            problem = str(error)
    made, problem = group.from_first((made, problem))
    if problem:
        raise ValueError(problem)
    return made  # type: ignore[return-value]


def join_group(
    process_group: Any = None,
    device: torch.device | str | None = None,
    *,
    timeout_seconds: float,
    starts_alone: bool = False,
    shares_gpus: bool = False,
    uses_torch: bool | None = None,
    num_replicas: int = 1,
    order: str = REPLICA_STAGE,
    mesh: object = None,
) -> Group:
    """A new group of the ranks of `process_group`, of torch.distributed, of torchrun's variables, or of this one alone.

    They make `num_replicas` replicas, in an `order` of `coordinates.ORDERS`; or they are those of a `mesh` of torch.distributed with
    the dimensions `replica` and `stage`, which then says both. Collective over these ranks. torch.distributed is started from torchrun's
    variables if nobody has; without them only if
    it `starts_alone`, for a caller that needs it, and `uses_torch` says whether somebody does. `device`, `shares_gpus`: see `choose_device`.

    Raises:
        ValueError: this process is not in `process_group`, or the ranks make no such replicas; they have different versions of what
            they run on.
        PipelineError: another rank could not be met within `timeout_seconds`.
    """
    given = None if mesh is None else _fitting(check_mesh(mesh), process_group, num_replicas)
    if given is None and not dist.is_initialized():  # before anybody waits for anybody
        grid_of(int(os.environ["WORLD_SIZE"]) if is_rank() else 1, num_replicas, order)
    chosen = choose_device(device, shares_gpus=shares_gpus)
    owns = not dist.is_initialized() and (starts_alone or is_rank())
    if owns:
        start_torch_distributed(chosen, timeout_seconds, is_used=uses_torch)
    if not dist.is_initialized():
        return Group(0, 1, chosen, None, timeout_seconds)
    ranks = dist.get_process_group_ranks(process_group) if given is None else ranks_of(given)
    if dist.get_rank() not in ranks:
        what = "group" if given is None else "mesh"
        raise ValueError(f"this process is not in `{what}`: make the Pipeline on the ranks of the {what} only")
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    grid = grid_of(size, num_replicas, order) if given is None else grid_of_mesh(given)
    members = "" if size == dist.get_world_size() else "-" + "-".join(map(str, ranks))
    number, _numbers[members] = _numbers[members], _numbers[members] + 1
    name = f"pipetrain/{name_of_attempt()}/group-{number}{members}"
    store = PrefixStore(name, dist.distributed_c10d._get_default_store()) if size > 1 else None
    return Group(
        rank, size, chosen, store, timeout_seconds, grid=grid, mesh=given, members=ranks, owns_process_group=owns
    )


def _fitting(mesh: DeviceMesh, process_group: Any, num_replicas: int) -> DeviceMesh:
    """Raises:
    ValueError: an argument contradicts the mesh.
    """
    replicas = grid_of_mesh(mesh).replica
    if num_replicas not in (1, replicas):
        raise ValueError(
            f"num_replicas={num_replicas}: the mesh has {replicas} along 'replica'; leave num_replicas out where there is a mesh"
        )
    if process_group is not None:
        raise ValueError("group and mesh were both given: a mesh says which ranks these are, so leave group out")
    return mesh
