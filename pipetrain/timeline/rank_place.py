"""Who a rank is, in words and in numbers, where a run has several replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """`rank` counts all ranks of the run, `place` those of its replica; `stages` are those that live there."""

    rank: int
    replica: int = 0
    place: int = 0
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        """`rank 5 (replica 1, stages 1 and 3)`, as messages have it."""
        *most, last = map(str, self.stages)
        held = f"stages {', '.join(most)} and {last}" if most else f"stage {last}"
        return f"rank {self.rank} (replica {self.replica}, {held})"


def name_of(rank: int, ranks: Sequence[RankPlace]) -> str:
    """`rank 3`; where `ranks`, in their order, are those of several replicas, with its place among them."""
    return str(ranks[rank]) if num_replicas_of(ranks) > 1 else f"rank {rank}"


def num_replicas_of(ranks: Iterable[RankPlace]) -> int:
    return len({where.replica for where in ranks})
