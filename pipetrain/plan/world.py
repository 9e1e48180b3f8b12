"""How many ranks a run has: whole pipelines (replicas), each of as many ranks as its stages need.

    ranks of the run = parallel.num_replicas x ranks of one replica           8 = 2 x 4

What is not said follows from the rest: the ranks of a replica from its stages, else from the ranks that there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.comm.coordinates import grid_of
from pipetrain.config.records import AUTO_REPLICAS, ClusterConfig, ParallelConfig, PipelineConfig
from pipetrain.schedule.csv_file import size_of_csv
from pipetrain.schedule.placement import ranks_named_in

_DEFAULT_RANKS = 2  # two stages are the smallest pipeline, and run on any machine


@dataclass(frozen=True)
class World:
    """`num_replicas` pipelines of `ranks_per_replica` ranks each."""

    num_replicas: int
    ranks_per_replica: int


def world_of(
    pipeline: PipelineConfig, parallel: ParallelConfig, cluster: ClusterConfig, num_ranks: int | None = None
) -> World:
    """The world of `num_ranks` existing ranks; None: of as many as the keys ask for.

    Raises:
        ValueError: the ranks do not make these replicas and stages; the message has the wrong factor and the nearest
            right ones.
    """
    replicas, wanted = parallel.num_replicas, ranks_wanted(pipeline)
    there_are = num_ranks
    if there_are is None and cluster.ranks_per_node is not None:
        there_are = cluster.num_nodes * cluster.ranks_per_node
    if not isinstance(replicas, int):
        return World(_as_many_as_fit(pipeline, there_are, wanted), wanted or 1)
    if replicas == 1:  # `place_stages` says what does not fit
        return World(1, num_ranks or wanted or there_are or max(cluster.num_nodes, _DEFAULT_RANKS))
    if wanted is None:
        least = max(-(-cluster.num_nodes // replicas), _DEFAULT_RANKS)
        return World(replicas, least if there_are is None else grid_of(there_are, replicas).stage)
    if num_ranks not in (None, replicas * wanted):
        raise ValueError(_does_not_fit(pipeline, replicas, num_ranks or 0, wanted))
    return World(replicas, wanted)


def ranks_wanted(pipeline: PipelineConfig) -> int | None:
    """The ranks that one replica needs: as many as the placement names, the stages need or the schedule's file has; None: any number."""
    if not isinstance(pipeline.placement, str):
        return ranks_named_in(pipeline.placement)
    if pipeline.num_stages is not None:
        return pipeline.num_stages // pipeline.stages_per_rank
    return size_of_csv(pipeline.schedule)[1] if pipeline.schedule.endswith(".csv") else None


def _as_many_as_fit(pipeline: PipelineConfig, there_are: int | None, wanted: int | None) -> int:
    said = f"parallel.num_replicas={AUTO_REPLICAS}"
    if wanted is None:
        raise ValueError(
            f"{said}: how many ranks make one replica is not said; set pipeline.num_stages, as in pipeline.num_stages=2"
        )
    if there_are is None:
        raise ValueError(
            f"{said}: how many ranks there are is not said; set cluster.ranks_per_node to those of each machine, or "
            "parallel.num_replicas to a number"
        )
    if there_are < wanted or there_are % wanted:
        raise ValueError(
            f"{said}: {there_are} ranks are not a multiple of the {wanted} of one replica ({_why(pipeline)}); start "
            f"{_nearest_multiples(there_are, wanted)} ranks, or set pipeline.num_stages"
        )
    return there_are // wanted


def _does_not_fit(pipeline: PipelineConfig, replicas: int, num_ranks: int, wanted: int) -> str:
    """The message: the ranks that both factors make, and which factor to change if the other fits."""
    text = (
        f"{num_ranks} ranks are not parallel.num_replicas={replicas} x {wanted} ranks of one replica ({_why(pipeline)}) = "
        f"{replicas * wanted}: start {replicas * wanted} ranks"
    )
    if num_ranks % wanted == 0:
        return f"{text}, or set parallel.num_replicas={num_ranks // wanted}"
    if num_ranks % replicas == 0 and isinstance(pipeline.placement, str):
        return f"{text}, or set pipeline.num_stages={num_ranks // replicas * pipeline.stages_per_rank}"
    return f"{text}, or {_nearest_multiples(num_ranks, wanted)} with parallel.num_replicas={AUTO_REPLICAS}"


def _why(pipeline: PipelineConfig) -> str:
    if not isinstance(pipeline.placement, str):
        return f"pipeline.placement={list(pipeline.placement)}"
    if pipeline.num_stages is None:
        return f"pipeline.schedule={pipeline.schedule}"
    per_rank = f" with pipeline.stages_per_rank={pipeline.stages_per_rank}" if pipeline.stages_per_rank > 1 else ""
    return f"pipeline.num_stages={pipeline.num_stages}{per_rank}"


def _nearest_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)
