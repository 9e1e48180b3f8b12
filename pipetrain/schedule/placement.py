"""Placement: which rank holds which stage, as a name or as a list with the rank of each stage.

    loop   0 1 2 0 1 2    a microbatch goes round the ranks (Narayanan et al. 2021, section 2.2)
    v      0 1 2 2 1 0    to the last rank and back, so that rank 0 holds the first stage and the last (Qi et al. 2023, ZB-V);
                          with more than two stages per rank, this repeats
    list   [2, 0, 1]      whatever suits the machines

Other code gets `stage_ranks`: stage s lives on rank `stage_ranks[s]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipetrain.schedule.policy import not_a_choice

Placement = str | Sequence[int]
MOST_STAGES = 4096  # a schedule of more takes minutes to make, to check and to draw


PLACEMENTS: dict[str, Callable[[int, int], int]] = {
    "loop": lambda stage, ranks: stage % ranks,
    "v": lambda stage, ranks: stage % ranks if stage // ranks % 2 == 0 else ranks - 1 - stage % ranks,
}


def stage_ranks_of(placement: Placement, num_stages: int, num_ranks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage. `num_ranks` defaults to those that a list names, or to a rank per stage.

    Raises:
        ValueError: an unknown name, a list that does not fit, or a rank that would hold no stage.
    """
    if not placement:
        raise ValueError("pipeline.placement=[] names no rank; give the rank of each stage, as in [0,1,1,0]")
    if num_stages < 1:
        raise ValueError(f"pipeline.num_stages={num_stages}: at least 1 is needed")
    if num_stages > MOST_STAGES and isinstance(placement, str):
        raise ValueError(
            f"{num_stages} stages (pipeline.num_stages, or ranks x pipeline.stages_per_rank) are too many: allowed are {MOST_STAGES}"
        )
    if isinstance(placement, str):
        ranks = num_stages if num_ranks is None else num_ranks
        if placement not in PLACEMENTS:
            more = ", or a list with the rank of each stage, as in [0,1,1,0]"
            raise not_a_choice("pipeline.placement", placement, list(PLACEMENTS), more)
        if not 1 <= ranks <= num_stages:
            raise ValueError(
                f"{ranks} ranks for pipeline.num_stages={num_stages}: each rank holds a stage or more, so use 1 to "
                f"{num_stages} ranks"
            )
        return tuple(PLACEMENTS[placement](stage, ranks) for stage in range(num_stages))
    listed = tuple(placement)
    if len(listed) != num_stages:
        raise ValueError(
            f"pipeline.placement={list(listed)} has {len(listed)} entries for {num_stages} stages; give the rank of each stage"
        )
    _check_ranks(listed, ranks_named_in(listed) if num_ranks is None else num_ranks)
    return listed


def ranks_named_in(listed: Sequence[int]) -> int:
    """How many ranks a list speaks of: one more than the highest that it names, at least one."""
    return max((0, *listed)) + 1


def spelling_of(stage_ranks: Sequence[int]) -> str:
    """What to write for `pipeline.placement` to have these ranks: a name where there is one."""
    ranks = ranks_named_in(stage_ranks)
    for name, rank_of in PLACEMENTS.items():
        if all(rank == rank_of(stage, ranks) for stage, rank in enumerate(stage_ranks)):
            return name
    return str(list(stage_ranks))


def _check_ranks(listed: tuple[int, ...], num_ranks: int) -> None:
    for stage, rank in enumerate(listed):
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"pipeline.placement={list(listed)}: there is no rank {rank} for stage {stage}; allowed are 0 to {num_ranks - 1}"
            )
    for rank in range(num_ranks):
        if rank not in listed:
            raise ValueError(
                f"pipeline.placement={list(listed)}: rank {rank} holds no stage; give each of the ranks 0 to {num_ranks - 1} "
                "one or more, or use fewer ranks"
            )
