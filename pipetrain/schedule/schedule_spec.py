"""Which schedule: the one record of everything that a schedule is made from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import ALWAYS_SPLIT, AUTO, WITH_WARMUP, ComputeLanes, Generator, Shape
from pipetrain.schedule.placement import ranks_named_in
from pipetrain.schedule.policy import LastStage, RecomputePolicy

# Stages x microbatches. A schedule with this many takes half a minute to make, check and simulate; one with ten times as many, ten minutes.
MOST_PASSES = 2**17
# Above this only one order is made; below, the fastest of several is chosen. Each takes seconds.
MOST_COMPARED = 2**14


@dataclass(frozen=True)
class ScheduleSpec:
    """What `make` makes a schedule from.

    `family` is a family's name, a path that ends in .csv, or a generator. Stage s lives on rank `stage_ranks[s]`. `warmup` is
    for `1f1b`: forwards in flight, a number or one per stage. `costs` (default: F 1, B 2, R 1, no hop) decide which kept sets,
    copies, positions of R and W, and order of `auto` are fastest. `first_backward` is the first stage in which something needs
    a gradient, `num_stages` for forwards only. `transport_ahead` tensors of a link are received ahead of use. `split_backward`
    makes I and W of each B. `order` is one that was found for the family `auto` (`order_of`); None: list scheduling makes one.
    `tied`: pairs of stages (lower, higher) that share parameters (`Plan.tied_stages`). `num_replicas` pipelines sum gradients.

    Raises:
        ValueError: numbers that do not fit each other; the message names the config key.
    """

    family: str | os.PathLike[str] | Generator
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    policy: RecomputePolicy = field(default_factory=RecomputePolicy)
    warmup: int | Sequence[int] | None = None
    costs: Costs | None = None
    first_backward: int = 0
    transport_ahead: int = 2
    split_backward: bool = False
    order: ComputeLanes | None = None
    tied: tuple[tuple[int, int], ...] = ()
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.family, os.PathLike):
            object.__setattr__(self, "family", os.fspath(self.family))
        if self.family == "inference":
            object.__setattr__(self, "first_backward", self.num_stages)
        self._check_numbers()
        self._check_family()
        self._check_parts()

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def name(self) -> str:
        """What `Schedule.family` says."""
        return self.family if isinstance(self.family, str) else getattr(self.family, "__name__", "custom")

    @property
    def shape(self) -> Shape:
        """What the generator gets to know."""
        return Shape(
            stage_ranks=self.stage_ranks,
            num_microbatches=self.num_microbatches,
            alternate_last=self.policy.keeps_at_once(self.num_stages - 1),
            warmup=self.warmup,
            first_backward=self.first_backward,
            num_parts=tuple(map(self.policy.num_parts, range(self.num_stages))) if self.policy.in_parts else (),
        )

    def _check_family(self) -> None:
        if not isinstance(self.family, str) and not callable(self.family):
            raise ValueError(
                f"pipeline.schedule={self.family!r}: give the name of a family, a path ending in .csv, or a generator, a "
                "function from a Shape to the ops of each rank"
            )
        if self.warmup is not None and isinstance(self.family, str) and self.family not in WITH_WARMUP:
            raise ValueError(
                f"pipeline.warmup={self.warmup} is for pipeline.schedule={WITH_WARMUP[0]}, not for {self.family!r}; leave it out"
            )
        if self.family == AUTO:
            self._check_auto()
        assert self.order is None or self.family == AUTO

    def _check_auto(self) -> None:
        ranks = ranks_named_in(self.stage_ranks)
        if ranks != self.num_stages:
            raise ValueError(
                f"pipeline.schedule=auto orders one stage per rank, not {self.num_stages} stages on {ranks} ranks; use "
                "pipeline.schedule=interleaved or gpipe, or pipeline.stages_per_rank=1"
            )
        if self.policy.last_stage is LastStage.ALWAYS:
            raise ValueError(
                "recompute.last_stage=always: pipeline.schedule=auto decides which sets are kept, those of the last stage too; "
                "use recompute.last_stage=auto, or a named family"
            )

    def _check_parts(self) -> None:
        if self.policy.in_parts and (self.split_backward or self.family in ALWAYS_SPLIT):
            halves = "pipeline.split_backward=true" if self.split_backward else f"pipeline.schedule={self.family}"
            raise ValueError(
                f"recompute.segments={self.policy.segments}: with {halves} a backward is split into I and W, which cannot run in parts; use "
                "recompute.segments=1, or whole backwards (pipeline.split_backward=false, another pipeline.schedule)"
            )

    def _check_numbers(self) -> None:
        stages, microbatches = self.num_stages, self.num_microbatches
        assert set(self.stage_ranks) == set(range(ranks_named_in(self.stage_ranks)))
        if microbatches < 1:
            raise ValueError(f"pipeline.num_microbatches={microbatches}: at least 1 is needed")
        if self.num_replicas < 1:
            raise ValueError(f"parallel.num_replicas={self.num_replicas}: at least 1 is needed, the pipeline itself")
        if stages * microbatches > MOST_PASSES:
            raise ValueError(
                f"pipeline.num_microbatches={microbatches} with {stages} stages: stages x microbatches may be {MOST_PASSES} at most, "
                f"which makes pipeline.num_microbatches={max(1, MOST_PASSES // stages)}"
            )
        if not 0 <= self.first_backward <= stages:
            raise ValueError(
                f"first_backward={self.first_backward}: allowed is a stage, or num_stages={stages} for forwards only"
            )
        if self.transport_ahead < 0:
            raise ValueError(f"transport.prefetch={self.transport_ahead}: tensors received ahead of use are 0 or more")
        self.policy.check_stages(stages)
