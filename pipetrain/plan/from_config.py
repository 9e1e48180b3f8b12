"""From a configuration to the plan and the schedule of its run."""

from __future__ import annotations

from typing import cast

from pipetrain.config.records import RecomputeConfig, RunConfig
from pipetrain.plan.plan import Plan, make_plan
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import size_of_csv
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule

DEFAULT_RANKS = 2  # two stages are the smallest pipeline, and run on any machine
EMBEDDING_AND_HEAD = 2  # layers of the model besides its blocks


def choose_num_ranks(config: RunConfig) -> int:
    """Ranks of the run: as many as the stages need, as the schedule's file has, as the machines have, or two.

    Raises:
        ValueError: the schedule's file cannot be read.
    """
    pipeline = config.pipeline
    if pipeline.num_stages is not None:
        return pipeline.num_stages // pipeline.stages_per_rank
    if pipeline.schedule.endswith(".csv"):
        return size_of_csv(pipeline.schedule)[1]
    cluster = config.cluster
    if cluster.gpus_per_node is not None:
        return cluster.num_nodes * cluster.gpus_per_node
    return max(cluster.num_nodes, DEFAULT_RANKS)


def choose_ranks_per_node(config: RunConfig, num_ranks: int) -> int:
    """How many of `num_ranks` ranks each machine starts.

    Raises:
        ValueError: machines and ranks do not fit each other.
    """
    cluster = config.cluster
    if cluster.gpus_per_node is None:
        per_node, rest = divmod(num_ranks, cluster.num_nodes)
        if rest or per_node == 0:
            raise ValueError(
                f"cluster.num_nodes={cluster.num_nodes}: {_needed(config, num_ranks)}, which cannot be spread evenly; "
                "the number of ranks must be a multiple of the number of nodes"
            )
        return per_node
    there_are = cluster.num_nodes * cluster.gpus_per_node
    if there_are != num_ranks:
        raise ValueError(
            f"cluster.num_nodes={cluster.num_nodes} x cluster.gpus_per_node={cluster.gpus_per_node} make {there_are} ranks, "
            f"but {_needed(config, num_ranks)}; set pipeline.num_stages={there_are * config.pipeline.stages_per_rank}, "
            "or other nodes and ranks per node"
        )
    return cluster.gpus_per_node


def _needed(config: RunConfig, num_ranks: int) -> str:
    pipeline = config.pipeline
    if pipeline.num_stages is None:
        return f"there are {num_ranks} ranks"
    return (
        f"pipeline.num_stages={pipeline.num_stages} with pipeline.stages_per_rank={pipeline.stages_per_rank} "
        f"need {num_ranks} ranks"
    )


def choose_plan(config: RunConfig, num_ranks: int) -> Plan:
    """Which layers make a stage, and which of `num_ranks` ranks holds it.

    Raises:
        ValueError: layers, stages and ranks do not fit each other.
    """
    return make_plan(
        config.model.num_blocks + EMBEDDING_AND_HEAD,
        num_ranks=num_ranks,
        num_stages=config.pipeline.num_stages,
        stages_per_rank=config.pipeline.stages_per_rank,
        num_microbatches=config.pipeline.num_microbatches,
        balance=config.pipeline.balance,
    )


def choose_policy(config: RecomputeConfig) -> RecomputePolicy:
    """What `recompute` asks for.

    Raises:
        ValueError: an unknown mode, or numbers out of range.
    """
    return RecomputePolicy(  # it makes enums of text itself, and names the nearest where there is none
        mode=cast(Mode, config.mode),
        ahead=config.ahead,
        keep=config.keep,
        last_stage=cast(LastStage, config.last_stage),
    )


def choose_schedule(config: RunConfig, num_ranks: int, costs: Costs | None = None) -> Schedule:
    """The order of all ops, proven to end.

    Raises:
        ValueError: an unknown family, or numbers that do not fit each other.
    """
    pipeline = config.pipeline
    schedule = make_schedule(
        pipeline.schedule,
        num_stages=num_ranks * pipeline.stages_per_rank,
        num_microbatches=pipeline.num_microbatches,
        num_ranks=num_ranks,
        recompute=choose_policy(config.recompute),
        warmup=pipeline.warmup,
        costs=costs,
    )
    check(schedule)
    return schedule


def choose_costs(config: RunConfig, num_stages: int) -> Costs:
    """The costs of `cost.*`, spread over the stages.

    Raises:
        ValueError: a list of the wrong length, or a negative time.
    """
    return Costs.spread(
        num_stages,
        forward=config.cost.forward_seconds,
        backward=config.cost.backward_seconds,
        recompute=config.cost.recompute_seconds,
        hop=config.cost.hop_seconds,
    )
