"""From a configuration to what runs: `RunConfig -> Run(plan, schedule, size)`. The only place where the two meet.

    RunConfig ── check ──► number of ranks ──► Plan (which layers, which rank) ──► Schedule (the order of all ops)

Without torch: the command line refuses a run that cannot be before a process starts, and a rank prepares the same again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipetrain.config.records import ClusterConfig, PipelineConfig, RecomputeConfig, RunConfig
from pipetrain.config.together import check_run, check_schedule
from pipetrain.model.size import ModelSize, size_of
from pipetrain.plan.plan import Plan, make_plan, place_stages
from pipetrain.schedule.check import check, refuse_unknown_kinds
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import size_of_csv
from pipetrain.schedule.make import make
from pipetrain.schedule.placement import ranks_named_in
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.timeline.shown import Shown, show_schedule

_DEFAULT_RANKS = 2  # two stages are the smallest pipeline, and run on any machine


@dataclass(frozen=True)
class Run:
    """What a configuration asks for, known before anything starts: where each layer lives, the order of all ops, the model's size."""

    plan: Plan
    schedule: Schedule
    size: ModelSize


def prepare(config: RunConfig, num_ranks: int | None = None) -> Run:
    """The run of `config` on `num_ranks` ranks; None: on as many as it asks for. The schedule is proven to end.

    Raises:
        ValueError: values out of range, or that do not fit each other, the model or the number of ranks; with the key, the
            value and what is allowed.
    """
    check_run(config)
    pipeline = config.pipeline
    ranks = _num_ranks(pipeline, config.cluster) if num_ranks is None else num_ranks
    size = size_of(config.model, sequence_length=config.data.sequence_length)
    plan = make_plan(
        size.num_layers,
        num_ranks=ranks,
        num_stages=pipeline.num_stages,
        stages_per_rank=pipeline.stages_per_rank,
        num_microbatches=pipeline.num_microbatches,
        balance=pipeline.balance,
        placement=pipeline.placement,
        split_backward=pipeline.split_backward,
        warmup=pipeline.warmup,
    )
    schedule = _schedule(pipeline, config.recompute, plan.stage_ranks)
    refuse_unknown_kinds(schedule)
    return Run(plan, schedule, size)


def predict(config: RunConfig) -> Shown:
    """The schedule of `config` with its step simulated on `cost.*`. Model, data and balance are not looked at.

    Raises:
        ValueError: an unknown family, or numbers out of range or that do not fit each other.
    """
    check_schedule(config)
    pipeline, cost = config.pipeline, config.cost
    stage_ranks = place_stages(
        pipeline.placement,
        num_ranks=_num_ranks(pipeline, config.cluster),
        num_stages=pipeline.num_stages,
        stages_per_rank=pipeline.stages_per_rank,
    )
    costs = Costs.spread(
        len(stage_ranks),
        forward=cost.forward_seconds,
        backward=cost.backward_seconds,
        recompute=cost.recompute_seconds,
        hop=cost.hop_seconds,
        input_gradient=cost.input_gradient_seconds,
        weight_gradient=cost.weight_gradient_seconds,
        input_share=cost.input_share,
    )
    return show_schedule(_schedule(pipeline, config.recompute, stage_ranks, costs), costs)


def _num_ranks(pipeline: PipelineConfig, cluster: ClusterConfig) -> int:
    """As many as the placement names, as the stages need, as the schedule's file has, as the machines have, or two."""
    if not isinstance(pipeline.placement, str):
        return ranks_named_in(pipeline.placement)
    if pipeline.num_stages is not None:
        return pipeline.num_stages // pipeline.stages_per_rank
    if pipeline.schedule.endswith(".csv"):
        return size_of_csv(pipeline.schedule)[1]
    if cluster.gpus_per_node is not None:
        return cluster.num_nodes * cluster.gpus_per_node
    return max(cluster.num_nodes, _DEFAULT_RANKS)


def _schedule(
    pipeline: PipelineConfig, recompute: RecomputeConfig, stage_ranks: tuple[int, ...], costs: Costs | None = None
) -> Schedule:
    schedule = make(
        ScheduleSpec(
            family=pipeline.schedule,
            stage_ranks=stage_ranks,
            num_microbatches=pipeline.num_microbatches,
            policy=RecomputePolicy(**asdict(recompute)),  # a field per key; it makes enums of text itself
            split_backward=pipeline.split_backward,
            warmup=pipeline.warmup,
            costs=costs,
        )
    )
    check(schedule)
    return schedule
