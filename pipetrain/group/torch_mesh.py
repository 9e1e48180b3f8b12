"""The grid of ranks as a mesh of torch.distributed: one that a user has, or one made for libraries that want it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.group.coordinates import REPLICA_STAGE, STAGE_REPLICA, Grid
from pipetrain.group.torch_distributed import connecting_on_use

REPLICA, STAGE, TENSOR = "replica", "stage", "tensor"


def check_mesh(mesh: object) -> DeviceMesh:
    """`mesh`, if it is one that a pipeline can have.

    Raises:
        ValueError: it has other dimensions, more than one part of a tensor, or ranks that do not count up.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={mesh!r}: give a DeviceMesh with the dimensions 'replica' and 'stage', as init_device_mesh(device_type, "
            "(num_replicas, num_ranks), mesh_dim_names=('replica', 'stage')) makes it"
        )
    names = mesh.mesh_dim_names or ()
    if not {REPLICA, STAGE} <= set(names) <= {REPLICA, STAGE, TENSOR}:
        raise ValueError(
            f"mesh has the dimensions {list(names)}: 'replica' and 'stage' are needed, and 'tensor' is allowed with 1 rank; name them by "
            "init_device_mesh(..., mesh_dim_names=('replica', 'stage'))"
        )
    if TENSOR in names and mesh.size(names.index(TENSOR)) != 1:
        raise ValueError(
            f"mesh has {mesh.size(names.index(TENSOR))} ranks along 'tensor': only 1 is supported so far; give the slice "
            "mesh['replica', 'stage']"
        )
    ranks = ranks_of(mesh)
    if ranks != sorted(ranks):
        raise ValueError(
            f"mesh has the ranks {mesh.mesh.tolist()}, which do not count up along its dimensions: make it with init_device_mesh, with "
            "the dimension last whose ranks are to be neighbours"
        )
    return mesh


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """All its ranks, row by row."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """The grid of a mesh that `check_mesh` has passed."""
    names = mesh.mesh_dim_names or ()
    order = REPLICA_STAGE if names.index(REPLICA) < names.index(STAGE) else STAGE_REPLICA
    return Grid(mesh.size(names.index(REPLICA)), mesh.size(names.index(STAGE)), order=order)


def make_mesh(grid: Grid, rank: int, members: list[int], device_type: str, timeout_seconds: float) -> DeviceMesh:
    """A mesh of `grid`, in which torch.distributed knows rank r as `members[r]`. Collective.

    Its groups connect two ranks when these first talk to each other, and are made by their own ranks alone: the other ranks of
    torch.distributed need not come.
    """
    groups = [_group_of(grid.ranks_of_stage(rank), members, timeout_seconds)]
    groups += [_group_of(grid.ranks_of_replica(rank), members, timeout_seconds)]
    rows = [[members[one] for one in grid.ranks_of_replica(first)] for first in grid.ranks_of_stage(0)]
    names = (REPLICA, STAGE)
    if grid.order == STAGE_REPLICA:
        groups, rows, names = groups[::-1], [list(row) for row in zip(*rows)], names[::-1]
    return DeviceMesh.from_group(groups, device_type, rows, mesh_dim_names=names)


def _group_of(ranks: tuple[int, ...], members: list[int], timeout_seconds: float) -> ProcessGroup:
    timeout = timedelta(seconds=timeout_seconds)
    with connecting_on_use():
        made: ProcessGroup = dist.new_group(
            [members[rank] for rank in ranks], timeout=timeout, use_local_synchronization=True
        )
    return made
