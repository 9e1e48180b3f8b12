"""`pipetrain plan`: the fastest ways to train within a memory budget per device, and why."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipetrain.cli.elsewhere import (
    add_foreign,
    check_foreign,
    estimated,
    for_cluster,
    present_foreign,
    told_of_estimate,
)
from pipetrain.cli.main import Arguments, Parser, add_json, add_overrides, add_own, present, say
from pipetrain.config.load import load_config
from pipetrain.config.records import NATIVE, RunConfig
from pipetrain.config.together import check_run, check_samples
from pipetrain.config.write_files import user_cache
from pipetrain.launcher.outcome import Exit
from pipetrain.models.size import ModelSize, size_of
from pipetrain.monitor.breakdown import break_down, bubble_fraction
from pipetrain.monitor.draw.table import Table, number, size
from pipetrain.plan.footprint import Holdings, RankMemory
from pipetrain.plan.host_memory import default_limit
from pipetrain.plan.planner import Plans, PricedPlan, frontier, make_plans, typed
from pipetrain.plan.profile import PROFILE, Profile
from pipetrain.plan.space import KEYS, Choice, PlanProblem
from pipetrain.plan.world import world_of
from pipetrain.schedule.policy import Mode, Offload
from pipetrain.trainer.prepare import number_bytes_of, policy_of, profile_of

_SHOWN = 5
_FEW = 4  # ranks, each of which has its bytes in the table; of more the fullest
# Keys that a group chosen by name sets.
_OF_GROUPS = {
    "pipeline": ("pipeline.schedule", "pipeline.stages_per_rank", "pipeline.placement"),
    "recompute": ("recompute.mode",),
    "parallel": ("parallel.num_replicas",),
}


def add_arguments(parser: Parser) -> None:
    add_overrides(parser)
    add_own(parser)
    add_json(parser)
    parser.add_argument("--out", metavar="FILE", help="draw the step over the budget, as FILE.svg or .png")
    add_foreign(parser)


def run(arguments: Arguments) -> int:
    check_foreign(arguments)
    if arguments.out is not None and Path(arguments.out).suffix not in (".svg", ".png"):
        raise ValueError(f"--out={arguments.out}: ends in no format that is known; allowed are .svg, .png")
    config = load_config(arguments.overrides, say)
    planned = plan_of_config(config, arguments.overrides)
    if arguments.out is not None:
        _draw(planned, Path(arguments.out))
    if arguments.peer is not None:
        return present_foreign(arguments, planned.config, planned.problem, planned.fitting[:1])
    present(arguments, planned.as_text, planned.as_json)
    return Exit.DONE


@dataclass(frozen=True)
class Planned:
    """The plans of a configuration: those that fit, the fastest first, or else those that need least."""

    plans: Plans
    config: RunConfig
    problem: PlanProblem
    size: ModelSize

    @property
    def budget(self) -> float:
        given = self.config.plan.memory_budget_bytes
        return float("inf") if given is None else float(given)

    @property
    def fitting(self) -> list[PricedPlan]:
        return self.plans.within(self.budget)

    @functools.cached_property
    def shown(self) -> list[PricedPlan]:
        """Five with different steps, schedules or stages: of others with the same ones the first is shown."""
        wanted = self.fitting or sorted(self.plans.plans, key=lambda one: (one.peak_bytes, one.step_seconds))
        found: dict[Any, PricedPlan] = {}
        for one in wanted:
            found.setdefault((f"{one.step_seconds:.4g}", one.choice.schedule, one.choice.num_stages), one)
        return list(found.values())[:_SHOWN]

    @functools.cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Of the simulated step of each plan that is shown: its speed, its bubble, and R per rank."""
        found = []
        for one in self.shown:
            ranks = break_down(one.schedule, one.timeline)
            tokens = self.problem.batch * self.config.data.sequence_length / one.timeline.step_seconds
            step: dict[str, Any] = {
                "tokens_per_second": tokens,
                "mfu": self._mfu(tokens),
                "bubble_fraction": bubble_fraction(ranks),
            }
            step["recompute_hidden_seconds"] = [rank.recompute_hidden_seconds for rank in ranks]
            step["recompute_exposed_seconds"] = [rank.recompute_exposed_seconds for rank in ranks]
            found.append(step)
        return found

    def _mfu(self, tokens_per_second: float) -> float | None:
        """None: what the model does, or a device can do (observe.peak_flops_per_second), is not known."""
        peak, flops = self.config.observe.peak_flops_per_second, self.size.flops_per_token
        if peak is None or flops is None:
            return None
        return tokens_per_second * flops / (peak * self.problem.num_ranks * self.config.plan.tensor)

    def as_json(self) -> dict[str, Any]:
        values = [{**one.as_json(), **step} for one, step in zip(self.shown, self.steps)]
        told = {} if self.fitting else {"missing_bytes": self.missing, "would_fit": self.would_fit()}
        budget = self.config.plan.memory_budget_bytes
        estimate = {"estimated": self.config.plan.cluster is not None}
        return {"fits": bool(self.fitting), **estimate, "memory_budget_bytes": budget, "plans": values, **told}

    @property
    def missing(self) -> int:
        return int(self.plans.smallest.peak_bytes - self.budget)

    def as_text(self) -> str:
        shown = self.shown
        told = told_of_estimate(self.config)
        verdict = "Plan 1 is the only one that fits." if len(shown) == 1 else _why(self)
        verdict = verdict if self.fitting else self.refusal()
        parts = [*([told] if told else []), _table(self), _memory_table(shown[0]), verdict]
        if any(one.choice.num_microbatches != self.problem.num_microbatches for one in shown):
            parts.append(
                "Other microbatches change dropout's masks and what BatchNorm sees; all else is computed as before."
            )
        numbered = [f"plan {n}: {' '.join(one.overrides)}" for n, one in enumerate(shown, 1)]
        return "\n\n".join([*parts, "\n".join(numbered)])

    def refusal(self) -> str:
        """By how much nothing fits, and what would make it fit."""
        budget = self.config.plan.memory_budget_bytes
        lead = f"Nothing fits plan.memory_budget_bytes={budget}: the smallest plan needs {size(self.missing)} more."
        return f"{lead} What would fit: {'; '.join(self.would_fit())}"

    def would_fit(self) -> list[str]:
        """Three changes with which a plan fits: two that cost least, on these ranks before more of them, those with the shortest step first;
        and more memory."""
        found = []
        for told, problem in _easier(self.problem):
            with suppress(ValueError):  # keys that allow no plan
                for best in make_plans(problem).within(self.budget)[:1]:
                    text = f"{told}: {size(best.peak_bytes)}, step {best.step_seconds:.3g} s"
                    found.append((problem.num_ranks, best.step_seconds, text))
        least = f"plan.memory_budget_bytes={self.plans.smallest.peak_bytes}: more memory"
        return [*(text for _, _, text in sorted(found)[:2]), least]


def _easier(problem: PlanProblem) -> Iterator[tuple[str, PlanProblem]]:
    """Changes that take memory off a rank, each with what to type."""
    for key in problem.held:
        rest = {name: value for name, value in problem.held.items() if name != key}
        yield f"without {key}={problem.held[key]}", replace(problem, held=rest)
    for factor in (2, 4):
        ranks = problem.num_ranks * factor
        free = {
            key: value for key, value in problem.held.items() if key not in ("pipeline.num_stages", "pipeline.balance")
        }
        if ranks <= problem.profile.num_layers:
            yield f"pipeline.num_stages={ranks} on {ranks} ranks", replace(problem, num_ranks=ranks, held=free)
    if problem.holdings.proves:
        yield "recompute.verify=off", replace(problem, holdings=replace(problem.holdings, proves=False))
    if problem.num_replicas > 1 and not problem.zero:
        yield "parallel.zero_stage=1", replace(problem, zero=True)
    if problem.profile.smaller and problem.batch > 1:
        batch = max(1, problem.batch // 2)
        yield f"data.global_batch_size={batch}", replace(problem, batch=batch)


def plan_of_config(config: RunConfig, overrides: Sequence[str]) -> Planned:
    """Raises:
    ValueError: keys or a profile that do not fit; a budget below what weights and their state take.
    """
    if config.plan.cluster is not None:
        config = for_cluster(config)
    given = config.plan
    tensor = given.tensor if given.cluster is None else 1
    check_run(replace(config, plan=replace(given, profile=None, cluster=None, tensor=tensor)))
    if config.engine.name != NATIVE:
        raise ValueError(f"engine.name={config.engine.name}: plans are for engine=native")
    if config.phases:
        raise ValueError("phases: a plan is for one set of keys; leave phases out")
    world = world_of(config.pipeline, config.parallel, config.cluster)
    config = replace(config, parallel=replace(config.parallel, num_replicas=world.num_replicas))
    check_samples(config, world.num_replicas)
    model = size_of(config.model, sequence_length=config.data.sequence_length)
    num_ranks = world.num_replicas * world.ranks_per_replica
    if config.plan.cluster is not None:
        profile, num_ranks = estimated(config)
        profile = profile.keeping(policy_of(config).keep_layers)
    elif config.plan.profile is None and not Path(PROFILE).is_file():
        raise ValueError(
            f"plan.profile is not set, and there is no {PROFILE} in this folder: type `pipetrain profile` with the same keys, then this again"
        )
    else:
        profile = profile_of(config)
    if not profile.layers:
        raise ValueError(
            f"plan.profile={config.plan.profile}: it has the times of stages, and a plan needs those of layers; type `pipetrain profile`"
        )
    problem = plan_problem_of(config, profile, model, held_in(config, overrides), num_ranks)
    key = (config.plan.profile or PROFILE) if config.plan.cluster is None else None
    seconds = config.pipeline.search_seconds
    plans = make_plans(problem, search_seconds=seconds, cache=user_cache("orders"), profile_key=key)
    planned, least = Planned(plans, config, problem, model), plans.smallest
    fixed = max(rank.weights + rank.gradients + rank.masters + rank.optimizer_state for rank in least.memory())
    if planned.budget < fixed:
        raise ValueError(
            f"plan.memory_budget_bytes={config.plan.memory_budget_bytes}: weights, gradients and optimizer state alone take {fixed} "
            f"bytes of a rank with {least.choice.num_stages} stages; give more, or use more stages (pipeline.num_stages)"
        )
    return planned


def plan_problem_of(
    config: RunConfig, profile: Profile, model: ModelSize, held: dict[str, Any], num_ranks: int
) -> PlanProblem:
    """What is to be planned, without the keys that `held` leaves open."""
    bytes_of, replicas, host_bytes = number_bytes_of(config), config.parallel.num_replicas, config.recompute.host_bytes
    if host_bytes is None and config.plan.cluster is None:  # as a run on these machines has it
        host_bytes = default_limit(config.cluster.ranks_per_node or -(-num_ranks // config.cluster.num_nodes))
    assert isinstance(replicas, int)
    free: dict[str, Any] = {"sets": None, "stash": None, "segments": 1, "selective": ()}
    policy = replace(
        policy_of(config), **{name: value for name, value in free.items() if f"recompute.{name}" not in held}
    )
    return PlanProblem(
        profile,
        config.data.global_batch_size,
        num_ranks,
        num_microbatches=config.pipeline.num_microbatches,
        num_replicas=replicas,
        policy=policy,
        held=held,
        holdings=Holdings(
            has_masters=bytes_of is not None and bytes_of.gradient > bytes_of.weight,
            casts=config.precision == "bf16-mixed" or (config.precision == "auto" and profile.device == "cuda"),
            tied=model.tied,
            proves=config.recompute.verify != "off",
            on_cuda=profile.device == "cuda",
            prefetch=config.transport.prefetch,
        ),
        zero=config.parallel.zero_stage == 1,
        host_bytes=host_bytes,
        current={key: typed(operator.attrgetter(key)(config)) for key in KEYS},
    )


def held_in(config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys that plan may set and that were typed, with their values; those typed as `auto` or null are open."""
    typed = [text.partition("=")[0] for text in overrides]
    names = {key for word in typed for key in _OF_GROUPS.get(word, (word,)) if key in KEYS}
    found = {}
    for key in KEYS:
        value = operator.attrgetter(key)(config)
        if key in names and value is not None and (value != "auto" or key == "pipeline.schedule"):
            found[key] = value
    return found


def _table(planned: Planned) -> str:
    rows = []
    for number_of, (one, step) in enumerate(zip(planned.shown, planned.steps), 1):
        choice, totals = one.choice, [rank.total for rank in one.memory()]
        hidden, exposed = (sum(step[f"recompute_{how}_seconds"]) for how in ("hidden", "exposed"))
        rows.append(
            {
                "plan": str(number_of),
                "schedule": f"{choice.schedule}{', split' if choice.split_backward else ''}",
                "layers": "-".join(map(str, choice.balance)),
                "m": str(choice.num_microbatches),
                "recompute": _recomputed(choice),
                "step": f"{one.timeline.step_seconds:.4g} s",
                "tokens/s": f"{step['tokens_per_second']:.4g}",
                "MFU": number(step["mfu"], "{:.1%}"),
                "bubble": number(step["bubble_fraction"], "{:.1%}"),
                "R hidden + exposed": f"{hidden:.3g} + {exposed:.3g} s",
                "peak per rank": " ".join(map(size, totals if len(totals) <= _FEW else [max(totals)])),
            }
        )
    return Table(tuple(rows[0]), [tuple(row.values()) for row in rows], left=frozenset({0, 1, 2, 4})).as_text()


def _recomputed(choice: Choice) -> str:
    if choice.mode is Mode.NEVER:
        return "never"
    sets = "-".join(f"{one:g}" for one in (choice.sets if isinstance(choice.sets, tuple) else (choice.sets,)) if one)
    more = [f"segments {choice.segments}"] * (choice.segments != 1) + list(map(str, choice.selective))
    more += [f"offload {choice.offload}"] * (choice.offload is not Offload.NONE)
    return ", ".join([f"{choice.mode}, sets {sets}", *more])


def _memory_table(one: PricedPlan) -> str:
    """The bytes of plan 1, a line per use."""
    memory = one.memory()
    uses = [(use.name, [getattr(rank, use.name) for rank in memory]) for use in fields(RankMemory)]
    rows = [(name.replace("_", " "), *map(size, held)) for name, held in uses if any(held)]
    rows.append(("all", *(size(rank.total) for rank in memory)))
    if any(one.host_bytes):
        rows.append(("host memory", *map(size, one.host_bytes)))
    return Table(("plan 1 holds", *(f"rank {rank}" for rank in range(len(memory)))), rows).as_text()


def _why(planned: Planned) -> str:
    """Why plan 1 wins, and what plan 2 would need."""
    first, second = planned.shown[:2]
    seconds = [one.timeline.step_seconds for one in (first, second)]
    exposed = [sum(step["recompute_exposed_seconds"]) for step in planned.steps]
    bubble = [step["bubble_fraction"] or 0.0 for step in planned.steps]
    if exposed[1] > exposed[0]:
        reason = f"less recomputation is exposed ({exposed[0]:.3g} s of all ranks, not {exposed[1]:.3g} s)"
    elif bubble[1] > bubble[0]:
        reason = f"ranks wait less (bubble {bubble[0]:.1%}, not {bubble[1]:.1%})"
    else:
        reason = "its slowest rank has less to do"
    lead = f"Plan 1 is {seconds[1] / seconds[0] - 1:.1%} faster than plan 2, because {reason}"
    if second.peak_bytes < first.peak_bytes:
        return f"{lead}; plan 2 would win with a budget below {first.peak_bytes} bytes ({size(first.peak_bytes)})."
    return f"{lead}; plan 2 would have to save {seconds[1] - seconds[0]:.3g} s per step to win."


def _draw(planned: Planned, path: Path) -> None:
    """The step of the fastest plan for each budget."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--out={path}: drawn with matplotlib; pip install 'pipetrain[train]' brings it") from error
    best = frontier(planned.plans.plans)
    unit, word = (1e9, "GB") if best[-1].peak_bytes > 1e10 else (1e6, "MB")
    given = planned.config.plan
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axis = figure.subplots()
    axis.step([one.peak_bytes / unit for one in best], [one.step_seconds for one in best], where="post", marker="o")
    axis.set_xlabel(f"memory per device, {word}")
    axis.set_ylabel("step, s")
    if given.cluster is not None:
        axis.set_title(f"Estimated, not measured: {given.cluster}, plan.tensor={given.tensor}")
    axis.grid(alpha=0.3)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise ValueError(f"--out={path}: cannot be written ({error.strerror})") from error
