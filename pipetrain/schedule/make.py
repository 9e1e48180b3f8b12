"""From a family's name to a schedule: the generator, then one pass for each concern."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import read_csv
from pipetrain.schedule.families import WITH_WARMUP, ComputeLanes, Generator, Shape, generator_of
from pipetrain.schedule.keep import with_best_kept
from pipetrain.schedule.kinds import Direction
from pipetrain.schedule.messages import add_messages
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import LastStage, RecomputePolicy
from pipetrain.schedule.recompute import AllKept, Sets, add_recompute, keep_all
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.waits import add_waits


def make_schedule(
    family: str | Generator = "gpipe",
    *,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None = None,
    recompute: str | RecomputePolicy = "overlap",
    warmup: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    first_backward: int = 0,
    transport_ahead: int = 2,
) -> Schedule:
    """The schedule of a family, of a file that ends in .csv, or of a generator: all lanes, and what each op waits for.

    Stage s lives on rank s mod `num_ranks` (default: a rank per stage). `warmup` is for `1f1b`: forwards in flight, a
    number or one per stage. `first_backward` is the first stage in which something needs a gradient, `num_stages` for
    forwards only. `costs` help to choose which sets to keep, where the policy keeps some.

    Raises:
        ValueError: an unknown family, a file that does not fit, or numbers that do not fit each other.
    """
    policy = RecomputePolicy.of(recompute)
    ranks = num_stages if num_ranks is None else num_ranks
    _check_numbers(num_stages, num_microbatches, ranks, first_backward, transport_ahead)
    if family == "inference":
        first_backward = num_stages
    if warmup is not None and family not in WITH_WARMUP and isinstance(family, str):
        raise ValueError(
            f"pipeline.warmup={warmup} is for pipeline.schedule={WITH_WARMUP[0]}, not for {family!r}; leave it out"
        )
    if policy.keep > num_microbatches and first_backward < num_stages:
        raise ValueError(f"recompute.keep={policy.keep}: a step has {num_microbatches} microbatches, so 0 to that many")
    shape = Shape(num_stages, num_microbatches, ranks, policy.last_stage is LastStage.AUTO, warmup, first_backward)
    name, compute = _ordered(family, shape)
    draft = draft_of(name, shape, compute, policy)
    return with_best_kept(draft, costs or Costs.spread(num_stages), lambda kept: lower(draft, kept, transport_ahead))


def _ordered(family: str | Generator, shape: Shape) -> tuple[str, ComputeLanes]:
    if not isinstance(family, str):
        return getattr(family, "__name__", "custom"), family(shape)
    return family, read_csv(family, shape) if family.endswith(".csv") else generator_of(family)(shape)


def draft_of(family: str, shape: Shape, compute: ComputeLanes, policy: RecomputePolicy) -> Schedule:
    """The compute lanes alone, without the R and B of stages in which nothing needs a gradient."""

    def needed(op: Op) -> bool:
        return op.kind.row.direction is Direction.FORWARD or op.stage >= shape.first_backward

    draft = Schedule(
        family=family,
        num_microbatches=shape.num_microbatches,
        stage_ranks=shape.stage_ranks,
        policy=policy,
        lanes=tuple({Lane.COMPUTE: tuple(op for op in ops if needed(op))} for ops in compute),
        waits={},
        kept=frozenset(),
        first_backward=shape.first_backward,
    )
    return keep_all(draft) if isinstance(compute, AllKept) else draft


def lower(draft: Schedule, chosen: Sets, transport_ahead: int) -> Schedule:
    """The passes, in order; `chosen` are the sets to keep besides those that B reads at once."""
    return add_waits(add_messages(add_recompute(draft, chosen)), transport_ahead)


def _check_numbers(stages: int, microbatches: int, ranks: int, first_backward: int, transport_ahead: int) -> None:
    if stages < 1:
        raise ValueError(f"pipeline.num_stages={stages}: at least 1 is needed")
    if microbatches < 1:
        raise ValueError(f"pipeline.num_microbatches={microbatches}: at least 1 is needed")
    if not 1 <= ranks <= stages:
        raise ValueError(
            f"{ranks} ranks for pipeline.num_stages={stages}: each rank holds a stage or more, so use 1 to {stages} ranks"
        )
    if not 0 <= first_backward <= stages:
        raise ValueError(f"first_backward={first_backward}: a stage, or num_stages={stages} for forwards only")
    if transport_ahead < 0:
        raise ValueError(f"transport.ahead={transport_ahead}: tensors received ahead of use are 0 or more")
