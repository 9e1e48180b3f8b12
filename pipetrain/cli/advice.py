"""What to do next after a run: changes of its keys whose simulated step is at least 1 % shorter, by the op times that it measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipetrain.cli.plan_command import plan_problem_of
from pipetrain.config.load import read
from pipetrain.config.phases import phases_of
from pipetrain.config.records import NATIVE, RunConfig
from pipetrain.config.target import SCHEDULES, is_extension
from pipetrain.config.terminal import printable
from pipetrain.models.size import size_of
from pipetrain.monitor.draw.table import size
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.shown import Shown
from pipetrain.plan.plan import Plan, read_plan
from pipetrain.plan.planner import make_plans
from pipetrain.plan.profile import read_profile
from pipetrain.plan.stage_costs import as_measured
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import AUTO
from pipetrain.trainer.prepare import predict, profile_of

_LEAST_GAIN = 0.01
_LEAST_OF_PLAN = 0.03  # of a whole plan: its keys are many
_MOST_LINES = 3
_MOST_PASSES = 2**12  # stages x microbatches: each change is simulated in less than a second
_TIMES = ("forward", "backward", "recompute", "input_gradient", "weight_gradient")
_HOPS = ("hop_forward", "hop_backward")
_Change = tuple[str, str, RunConfig, Costs]  # why, the keys to type, and what these make of the run
_BUILT_IN = ("llama", "gpt2")  # models whose FLOPs are known without a file or the code of anybody else


@dataclass(frozen=True)
class NextStep:
    """One change. `gain`: the share of the step that it saves, simulated."""

    why: str
    keys: str
    gain: float

    def __str__(self) -> str:
        return printable(f"{self.why}: {self.keys}: {self.gain:.0%} less time per step, simulated.")


def advice_on(folder: RunFolder) -> list[NextStep]:
    """The changes that gain most, the best first; none where nothing helps, or where the folder does not tell what its ops took."""
    try:
        config, plan, costs = _measured(folder)
        now = predict(_without_profile(config), costs)
    except (ValueError, KeyError, TypeError, OSError):
        return []
    if config.engine.name != NATIVE or plan.num_stages * plan.num_microbatches > _MOST_PASSES or now.step_seconds <= 0:
        return []
    found: dict[str, NextStep] = {}  # by key: of several values of one key the best
    for why, keys, other, other_costs in _changes(config, plan, costs, now):
        try:
            gain = 1 - predict(_without_profile(other), other_costs).step_seconds / now.step_seconds
        except ValueError:  # the keys do not fit each other
            continue
        key = keys.split("=")[0]
        if gain >= _LEAST_GAIN and (key not in found or gain > found[key].gain):
            found[key] = NextStep(why, keys, gain)
    best = sorted(found.values(), key=lambda advice: -advice.gain)[:_MOST_LINES]
    return [*_better_plan(folder, config, plan, costs, now.step_seconds), *best][:_MOST_LINES]


def _better_plan(folder: RunFolder, config: RunConfig, plan: Plan, costs: Costs, seconds: float) -> Iterator[NextStep]:
    """The first plan for the budget by the op times of this run, where its layers are known and it is 3 % faster."""
    given = str(folder.layers) if folder.layers.is_file() else config.plan.profile
    if given is None or config.model.name not in _BUILT_IN:
        return
    try:
        profile = profile_of(replace(config, plan=replace(config.plan, profile=given)))
        if not profile.layers:
            return
        held = {"pipeline.num_microbatches": plan.num_microbatches, "parallel.num_replicas": plan.num_replicas}
        model = size_of(config.model, sequence_length=config.data.sequence_length)
        problem = plan_problem_of(config, as_measured(profile, plan.balance, costs), model, held, plan.world_size)
        fitting = make_plans(problem, profile_key=given).within(config.plan.memory_budget_bytes or float("inf"))
    except ValueError:
        return
    if fitting and (gain := 1 - fitting[0].step_seconds / seconds) >= _LEAST_OF_PLAN:
        yield NextStep("Another plan, by the op times of this run", " ".join(fitting[0].overrides), gain)


def _measured(folder: RunFolder) -> tuple[RunConfig, Plan, Costs]:
    """The configuration of the last phase, with the plan that it ran by, and what its ops took."""
    config = read(folder.config)
    phases = phases_of(config)
    own = folder.phase(len(phases) - 1) if len(phases) > 1 else folder
    plan, costs = read_plan(own.plan), read_profile(str(own.profile)).costs
    if costs is None or (phases[-1].config.pipeline.schedule == AUTO and not own.schedule.is_file()):
        raise ValueError(f"{own.profile}: does not say what ops took")
    config = phases[-1].config
    if config.pipeline.on_call is not None or is_extension(config.pipeline.schedule, SCHEDULES):
        raise ValueError(f"{own.plan}: was made by the user's code, which a run folder may not name")
    pipeline = replace(
        config.pipeline,
        schedule=str(own.schedule) if config.pipeline.schedule == AUTO else config.pipeline.schedule,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        balance=plan.balance,
    )
    return replace(config, pipeline=pipeline), plan, costs


def _without_profile(config: RunConfig) -> RunConfig:
    return replace(config, plan=replace(config.plan, profile=None))


def _changes(config: RunConfig, plan: Plan, costs: Costs, now: Shown) -> Iterator[_Change]:
    recompute, pipeline = config.recompute, config.pipeline
    recomputes = recompute.mode != "never"
    if recomputes and recompute.mode != "overlap":
        other = replace(config, recompute=replace(recompute, mode="overlap"))
        yield "Recomputation may run while its rank waits", "recompute.mode=overlap", other, costs
    if recomputes and recompute.sets in (None, 1):
        room = f" of {size(max(costs.set_bytes))} at most" if costs.set_bytes else ""
        other = replace(config, recompute=replace(recompute, sets=2))
        yield f"Each rank may hold a second activation set{room}", "recompute.sets=2", other, costs
    for family in ("1f1b", "gpipe"):
        if plan.num_stages == plan.num_ranks and pipeline.schedule != family:
            other = replace(config, pipeline=replace(pipeline, schedule=family, warmup=None))
            yield "Another order of the same ops", f"pipeline.schedule={family}", other, costs
    more = 2 * plan.num_microbatches
    if config.data.global_batch_size >= more * plan.num_replicas:
        half = replace(costs, **{name: tuple(one / 2 for one in getattr(costs, name)) for name in (*_TIMES, *_HOPS)})
        other = replace(config, pipeline=replace(pipeline, num_microbatches=more))
        why = "Smaller microbatches fill the pipeline sooner, if half of one takes half as long"
        yield why, f"pipeline.num_microbatches={more}", other, half
    if plan.num_stages == plan.num_ranks:
        yield from _balances(config, plan, costs, [rank.busy_seconds for rank in now.breakdown])


def _balances(config: RunConfig, plan: Plan, costs: Costs, work: Sequence[float]) -> Iterator[_Change]:
    """One layer, or two, from the slowest stage to each other one; `work`: busy seconds of each in a step."""
    slowest = max(range(plan.num_stages), key=work.__getitem__)
    others = [seconds for stage, seconds in enumerate(work) if stage != slowest]
    if not others or not (mean := sum(others) / len(others)):
        return
    why = f"Stage {slowest} takes {work[slowest] / mean - 1:.0%} longer than the others do on average"
    seconds = _seconds_of_layers(config, plan, costs)
    for stage in range(plan.num_stages):
        for moved in (1, 2):
            balance = list(plan.balance)
            balance[slowest] -= moved
            balance[stage] += moved
            if stage == slowest or balance[slowest] < 1:
                continue
            other = replace(config, pipeline=replace(config.pipeline, balance=tuple(balance)))
            moved_costs = replace(costs, **{name: _summed(of, balance) for name, of in seconds.items()})
            yield why, f"pipeline.balance={json.dumps(balance, separators=(',', ':'))}", other, moved_costs


def _seconds_of_layers(config: RunConfig, plan: Plan, costs: Costs) -> dict[str, list[float]]:
    """Per kind of time that of each layer: its share of its stage's, by FLOPs where the model is built in, else an equal one."""
    work: Sequence[float] | None = None
    if config.model.name in _BUILT_IN:
        work = size_of(config.model, sequence_length=config.data.sequence_length).flops_per_layer
    if work is None or len(work) != plan.num_layers:
        work = (1.0,) * plan.num_layers
    stages = [plan.stage_of(layer) for layer in range(plan.num_layers)]
    shares = [
        work[layer] / (sum(work[one] for one in plan.layers_of(stage)) or 1) for layer, stage in enumerate(stages)
    ]
    return {
        name: [of_stages[stage] * share for stage, share in zip(stages, shares)]
        for name in _TIMES
        if (of_stages := getattr(costs, name))
    }


def _summed(of_layers: Sequence[float], balance: Sequence[int]) -> tuple[float, ...]:
    ends = list(itertools.accumulate(balance))
    return tuple(sum(of_layers[end - count : end]) for end, count in zip(ends, balance))
