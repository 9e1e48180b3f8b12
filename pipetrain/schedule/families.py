"""The families of schedules: each is one generator of F and B, a few lines below its picture.

A generator says in which order each rank runs F and B. It knows nothing of recomputation, messages or edges: passes add
those. To add a family, write its generator and put it into `FAMILIES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipetrain.schedule.op import Kind, Op


@dataclass(frozen=True)
class Shape:
    """What a generator gets to know: stage s lives on rank `stage_ranks[s]`.

    `alternate_last`: the last stage, whose gradient needs no message, runs F0 B0 F1 B1 ... `warmup`: forwards in
    flight, for families that know the word.
    """

    num_stages: int
    num_microbatches: int
    num_ranks: int
    alternate_last: bool = True
    warmup: int | Sequence[int] | None = None

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return tuple(stage % self.num_ranks for stage in range(self.num_stages))

    def stages_of(self, rank: int) -> range:
        return range(rank, self.num_stages, self.num_ranks)


ComputeLanes = list[list[Op]]
Generator = Callable[[Shape], ComputeLanes]


def gpipe(shape: Shape) -> ComputeLanes:
    """All forwards, then all backwards (Huang et al. 2019); the last stage takes its gradient at once.

    rank 0  F0 F1 F2 .  .  .  .  B0 .  B1 .  B2
    rank 1     F0 F1 F2 .  .  B0 .  B1 .  B2
    rank 2        F0 B0 F1 B1 F2 B2
    """
    lanes: ComputeLanes = []
    for rank in range(shape.num_ranks):
        stages = shape.stages_of(rank)
        forwards = [op for stage in stages for op in _forwards_of(stage, shape)]
        lanes.append(forwards + [op for stage in reversed(stages) for op in _backwards_of(stage, shape)])
    return lanes


def _forwards_of(stage: int, shape: Shape) -> list[Op]:
    microbatches = range(shape.num_microbatches)
    if shape.alternate_last and stage == shape.num_stages - 1:
        return [Op(stage, kind, microbatch) for microbatch in microbatches for kind in (Kind.F, Kind.B)]
    return [Op(stage, Kind.F, microbatch) for microbatch in microbatches]


def _backwards_of(stage: int, shape: Shape) -> list[Op]:
    if shape.alternate_last and stage == shape.num_stages - 1:
        return []
    return [Op(stage, Kind.B, microbatch) for microbatch in range(shape.num_microbatches)]


def inference(shape: Shape) -> ComputeLanes:
    """Forwards only.

    rank 0  F0 F1 F2
    rank 1     F0 F1 F2
    rank 2        F0 F1 F2
    """
    return [
        [
            Op(stage, Kind.F, microbatch)
            for stage in shape.stages_of(rank)
            for microbatch in range(shape.num_microbatches)
        ]
        for rank in range(shape.num_ranks)
    ]


FAMILIES: dict[str, Generator] = {
    "gpipe": gpipe,
    "inference": inference,
}


def generator_of(family: str) -> Generator:
    """The generator of a family.

    Raises:
        ValueError: no family has this name; the message says the nearest.
    """
    if family in FAMILIES:
        return FAMILIES[family]
    nearest = difflib.get_close_matches(family, list(FAMILIES), n=1, cutoff=0.0)[0]
    raise ValueError(
        f"pipeline.schedule={family!r}: allowed are {', '.join(FAMILIES)} or a path ending in .csv; "
        f"did you mean {nearest!r}?"
    )
