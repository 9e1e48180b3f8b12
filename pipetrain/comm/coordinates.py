"""Where a rank stands: the grid of all ranks, its coordinates in it, and what it is called in messages. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REPLICA_STAGE, STAGE_REPLICA = "replica-stage", "stage-replica"
ORDERS = (REPLICA_STAGE, STAGE_REPLICA)
"""The order of the dimensions; ranks along the last are neighbours, on one node if it has room."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's place along each dimension of the grid: which replica, where in the pipeline, which part of a tensor."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """How many ranks there are along each dimension: replicas, ranks of a pipeline, parts of a tensor (1 so far).

    Ranks count along `tensor` first, then along the last dimension of `order`, so these are neighbours: with `replica-stage` the ranks
    of a replica, who send each other each microbatch, with `stage-replica` those that hold the same stages.

        replica-stage   stage 0  1  2      stage-replica   stage 0  1  2
        replica 0             0  1  2      replica 0             0  2  4
        replica 1             3  4  5      replica 1             1  3  5
    """

    replica: int = 1
    stage: int = 1
    tensor: int = 1
    order: str = REPLICA_STAGE

    @property
    def size(self) -> int:
        """Ranks of the whole grid."""
        return self.replica * self.stage * self.tensor

    def coordinates_of(self, rank: int) -> Coordinates:
        """Raises:
        ValueError: the grid has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} of {self.size} ranks: they count from 0")
        rest, tensor = divmod(rank, self.tensor)
        if self.order == STAGE_REPLICA:
            stage, replica = divmod(rest, self.replica)
        else:
            replica, stage = divmod(rest, self.stage)
        return Coordinates(replica, stage, tensor)

    def rank_of(self, place: Coordinates) -> int:
        """The rank at `place`."""
        if self.order == STAGE_REPLICA:
            return (place.stage * self.replica + place.replica) * self.tensor + place.tensor
        return (place.replica * self.stage + place.stage) * self.tensor + place.tensor

    def ranks_of_replica(self, rank: int) -> tuple[int, ...]:
        """The ranks of the pipeline that `rank` is in, from the first to the last."""
        own = self.coordinates_of(rank)
        return tuple(self.rank_of(Coordinates(own.replica, stage, own.tensor)) for stage in range(self.stage))

    def ranks_of_stage(self, rank: int) -> tuple[int, ...]:
        """The ranks that stand where `rank` does in each replica, from the first replica to the last."""
        own = self.coordinates_of(rank)
        return tuple(self.rank_of(Coordinates(replica, own.stage, own.tensor)) for replica in range(self.replica))


def grid_of(num_ranks: int, num_replicas: int, order: str = REPLICA_STAGE) -> Grid:
    """`num_ranks` ranks as replicas of equal size.

    Raises ValueError: they make none; with the nearest numbers that do.
    """
    if order not in ORDERS:
        raise ValueError(f"parallel.order={order!r}: allowed are {' and '.join(ORDERS)}")
    if num_ranks % num_replicas:
        divisors = [divisor for divisor in range(1, num_ranks + 1) if num_ranks % divisor == 0]
        nearest = min(divisors, key=lambda number: (abs(number - num_replicas), number))
        fewer, more = num_ranks // num_replicas * num_replicas, -(-num_ranks // num_replicas) * num_replicas
        ranks = f"{fewer} or {more} ranks" if fewer else f"{more} ranks"
        raise ValueError(
            f"parallel.num_replicas={num_replicas}: {num_ranks} ranks make no {num_replicas} replicas of equal size; start {ranks}, or "
            f"set parallel.num_replicas={nearest}"
        )
    return Grid(num_replicas, num_ranks // num_replicas, order=order)


def named_place(rank: int, replica: int, stages: Sequence[int]) -> str:
    """`rank 5 (replica 1, stages 1 and 3)`."""
    *most, last = map(str, stages)
    held = f"stages {', '.join(most)} and {last}" if most else f"stage {last}"
    return f"rank {rank} (replica {replica}, {held})"


class Names:
    """What each rank of a grid is called in messages: by its number, and where there are replicas by its coordinates, too."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._stage_ranks: Sequence[int] = ()

    def tell_stages(self, stage_ranks: Sequence[int]) -> None:
        """Which rank of a replica holds which stage."""
        self._stage_ranks = stage_ranks

    def __call__(self, rank: int) -> str:
        """`rank 5`, or `rank 5 (replica 1, stages 1 and 3)`."""
        if self._grid.replica == 1:
            return f"rank {rank}"
        at = self._grid.coordinates_of(rank)
        stages = [stage for stage, holder in enumerate(self._stage_ranks) if holder == at.stage]
        # Until it is known which stages they hold, ranks are told apart by where they stand in their replica.
        return (
            named_place(rank, at.replica, stages) if stages else f"rank {rank} (replica {at.replica}, place {at.stage})"
        )
