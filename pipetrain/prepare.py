"""From a configuration to what runs: `RunConfig -> Run(plan, schedule, size)`. The only place where the two meet.

    RunConfig ── check ──► number of ranks ──► Plan (which layers, which rank) ──► Schedule (the order of all ops)

Without torch: the command line refuses a run that cannot be before a process starts, and a rank prepares the same again.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace

from pipetrain.config.records import ClusterConfig, PipelineConfig, RunConfig
from pipetrain.config.together import check_run, check_schedule, check_ties
from pipetrain.model.size import ModelSize, size_of
from pipetrain.plan.climb import Effort
from pipetrain.plan.measured import check_profile, read_profile
from pipetrain.plan.order_cache import cache_folder
from pipetrain.plan.plan import Plan, make_plan, place_stages
from pipetrain.plan.search import FoundSchedule, best_schedule
from pipetrain.schedule.check import check, refuse_unknown_kinds
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv, size_of_csv
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.make import make
from pipetrain.schedule.placement import ranks_named_in
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.timeline.shown import Shown, show_schedule

_Pairs = tuple[tuple[int, int], ...]  # of stages that share parameters

_DEFAULT_RANKS = 2  # two stages are the smallest pipeline, and run on any machine


@dataclass(frozen=True)
class Run:
    """What a configuration asks for, known before anything starts: where each layer lives, the order of all ops, the model's size."""

    plan: Plan
    schedule: Schedule
    size: ModelSize
    found: FoundSchedule | None = None  # where pipeline.schedule=auto was sought


def prepare(config: RunConfig, num_ranks: int | None = None, order: str | None = None) -> Run:
    """The run of `config` on `num_ranks` ranks; None: on as many as it asks for. The schedule is proven to end.

    `order` is that of pipeline.schedule=auto, as `write_csv` spells it, where it is known; else it is sought.

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
        work=size.flops_per_layer,
        placement=pipeline.placement,
        split_backward=pipeline.split_backward,
        warmup=pipeline.warmup,
        transport_ahead=config.transport.ahead,
        communicators=config.transport.communicators,
        edges=config.transport.edges,
    )
    tied, found = plan.tied_stages(size.tied), None
    check_ties(config, tied)
    if order is None and pipeline.schedule == AUTO:
        found = _sought(config, plan.stage_ranks, _costs(config, plan.num_stages), tied)
    schedule = _schedule(config, plan.stage_ranks, order=order, tied=tied) if found is None else found.schedule
    refuse_unknown_kinds(schedule)
    return Run(plan, schedule, size, found)


def predict(config: RunConfig) -> Shown:
    """The schedule of `config` with its step simulated on `cost.*`. Model, data and balance are not looked at.

    Raises:
        ValueError: an unknown family, or numbers out of range or that do not fit each other.
    """
    check_schedule(config)
    pipeline = config.pipeline
    stage_ranks = place_stages(
        pipeline.placement,
        num_ranks=_num_ranks(pipeline, config.cluster),
        num_stages=pipeline.num_stages,
        stages_per_rank=pipeline.stages_per_rank,
    )
    costs = _costs(config, len(stage_ranks))
    if pipeline.schedule == AUTO:
        found = _sought(config, stage_ranks, costs)
        return show_schedule(found.schedule, costs, found.least_seconds)
    return show_schedule(_schedule(config, stage_ranks, costs), costs)


def _costs(config: RunConfig, num_stages: int) -> Costs:
    """Those of the run that `plan.profile` names, else those of `cost.*`."""
    cost, given = config.cost, config.plan.profile
    if given is not None:
        profile = read_profile(given)
        check_profile(given, profile, num_stages, config.pipeline.num_microbatches)
        return profile.costs
    return Costs.spread(
        num_stages,
        forward=cost.forward_seconds,
        backward=cost.backward_seconds,
        recompute=cost.recompute_seconds,
        hop=cost.hop_seconds,
        input_gradient=cost.input_gradient_seconds,
        weight_gradient=cost.weight_gradient_seconds,
        input_share=cost.input_share,
        reduce=cost.reduce_seconds,
    )


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


def _sought(config: RunConfig, stage_ranks: tuple[int, ...], costs: Costs, tied: _Pairs = ()) -> FoundSchedule:
    """The best order for the costs, from the user's cache where it was sought before."""
    effort = Effort(config.pipeline.search_seconds)
    return best_schedule(replace(_spec(config, stage_ranks), tied=tied), costs, effort, cache_folder(), _say)


def _say(text: str) -> None:
    print(f"pipetrain: {text}", file=sys.stderr, flush=True)


def _schedule(
    config: RunConfig,
    stage_ranks: tuple[int, ...],
    costs: Costs | None = None,
    order: str | None = None,
    tied: _Pairs = (),
) -> Schedule:
    spec = replace(_spec(config, stage_ranks), costs=costs, tied=tied)
    if order is not None:
        spec = replace(spec, order=order_of_csv(order, "the order of pipeline.schedule=auto", spec.shape))
    schedule = make(spec)
    check(schedule)
    return schedule


def _spec(config: RunConfig, stage_ranks: tuple[int, ...]) -> ScheduleSpec:
    return ScheduleSpec(
        family=config.pipeline.schedule,
        stage_ranks=stage_ranks,
        num_microbatches=config.pipeline.num_microbatches,
        policy=RecomputePolicy(**asdict(config.recompute)),  # a field per key; it makes enums of text itself
        split_backward=config.pipeline.split_backward,
        warmup=config.pipeline.warmup,
        transport_ahead=config.transport.ahead,
    )
