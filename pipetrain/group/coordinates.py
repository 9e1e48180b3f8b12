"""Where a rank stands: the grid of all ranks, and its coordinates in it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """A rank's place along each dimension of the grid: which replica, where in the pipeline, which part of a tensor."""

    replica: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """How many ranks there are along each dimension. Only pipelines have more than one rank so far.

    Ranks count along `tensor` first and along `replica` last: who talks most are neighbours, on one machine if it has room.
    """

    replica: int = 1
    stage: int = 1
    tensor: int = 1

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
        replica, stage = divmod(rest, self.stage)
        return Coordinates(replica, stage, tensor)

    def rank_of(self, place: Coordinates) -> int:
        """The other way round."""
        return (place.replica * self.stage + place.stage) * self.tensor + place.tensor
