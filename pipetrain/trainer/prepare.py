"""From a configuration to what runs: `RunConfig -> Run(plan, schedule, size)`. The only place where the two meet.

    RunConfig ── check ──► number of ranks ──► Plan (which layers, which rank) ──► Schedule (the order of all ops)

Without torch: the command line refuses a run that cannot be before a process starts, and a rank prepares the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pipetrain.comm.coordinates import Grid
from pipetrain.config.phases import Phase, naming_phase, phases_of
from pipetrain.config.records import NATIVE, PYTHON, WEIGHTS_IN, RunConfig
from pipetrain.config.target import SCHEDULES, is_extension, load_extension
from pipetrain.config.terminal import say
from pipetrain.config.together import check_run, check_samples, check_schedule
from pipetrain.config.write_files import user_cache
from pipetrain.engine.available import check_engine
from pipetrain.models.size import ModelSize, size_of
from pipetrain.monitor.shown import Shown, show_schedule
from pipetrain.plan.balance import balance_by_step, balance_told, costs_by_work, cut_by_work
from pipetrain.plan.footprint import Footprint, Holdings
from pipetrain.plan.mesh import Holds, Mesh, NumberBytes, mesh_of
from pipetrain.plan.plan import Plan, make_plan, place_stages
from pipetrain.plan.profile import PROFILE, Profile, check_conditions, check_profile, read_profile
from pipetrain.plan.stage_costs import bytes_of_layers, costs_of_layers, seconds_of_layers
from pipetrain.plan.world import world_of
from pipetrain.schedule.check import check, check_calls
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv
from pipetrain.schedule.families import AUTO, FAMILIES
from pipetrain.schedule.make import make
from pipetrain.schedule.policy import OFF, Mode, RecomputePolicy
from pipetrain.schedule.reduce import with_reduces
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import FoundSchedule, best_schedule
from pipetrain.schedule.simulate import simulate

_SAMPLES = "data.global_batch_size / (parallel.num_replicas * pipeline.num_microbatches)"
_NO_WORK_OF_LAYERS = ("revision", "weights")  # keys of the model that no time of a layer depends on


@dataclass(frozen=True)
class Run:
    """What a configuration asks for, known before anything starts: where each layer lives, the order of all ops, the model's size."""

    plan: Plan
    schedule: Schedule
    size: ModelSize
    found: FoundSchedule | None = None  # the result of the search for pipeline.schedule=auto
    note: str = ""  # why pipeline.balance=auto does not give stages equal work


def prepare(config: RunConfig, num_ranks: int | None = None, order: str | None = None) -> Run:
    """The run of `config` on `num_ranks` ranks, those of all replicas; None: on as many as it asks for. The schedule is proven to end.

    `order` is that of pipeline.schedule=auto, as `write_csv` spells it; None: it is searched for.

    Raises ValueError: values out of range, or that do not fit each other, the model or the number of ranks; with the key, the value and
    what is allowed.
    """
    check_run(config)
    check_engine(config)
    if config.plan.auto:
        raise ValueError(
            "plan=auto: `pipetrain train` plans; ranks that are started otherwise need the keys that `pipetrain plan` prints"
        )
    pipeline = config.pipeline
    world = world_of(pipeline, config.parallel, config.cluster, num_ranks)
    check_samples(config, world.num_replicas)
    given, config = config, _with_replicas(config, world.num_replicas)
    size = size_of(config.model, sequence_length=config.data.sequence_length)
    plan = make_plan(
        size.num_layers,
        num_ranks=world.ranks_per_replica,
        num_stages=pipeline.num_stages,
        stages_per_rank=pipeline.stages_per_rank,
        num_microbatches=pipeline.num_microbatches,
        num_replicas=world.num_replicas,
        order=config.parallel.order,
        balance=pipeline.balance,
        work=size.flops_per_layer,
        placement=pipeline.placement,
        split_backward=pipeline.split_backward,
        warmup=pipeline.warmup,
        transport_ahead=config.transport.prefetch,
        communicators=config.transport.communicators,
        edges=config.transport.backend,
    )
    plan, note = _balanced(config, plan, size)
    if (
        config.model.name == PYTHON
        and pipeline.balance == "auto"
        and config.plan.profile is None
        and plan.num_stages > 1
    ):
        of = "numbers of layers" if size.flops_per_layer is None else "parameters"
        note += f"{note and '; '}layers of model=python are balanced by {of}, until plan.profile names a file of `pipetrain profile`"
    tied, found = plan.tied_stages(size.tied), None
    # With the keys as given: `num_replicas=auto` may leave one, with nothing to share.
    check_engine(given, world.num_replicas, tied)
    policy_of(config).check_layers(plan.num_layers)
    _refuse_profile_without_layers(config)
    policy = _in_parts(config, plan.balance, size)
    spec = replace(_spec(config, plan.stage_ranks, policy), tied=tied)
    if order is not None:
        spec = replace(spec, order=order_of_csv(order, "the order of pipeline.schedule=auto", spec.shape))
    elif pipeline.schedule == AUTO:
        found = _sought(spec, _costs(config, plan.num_stages, size.flops_per_layer)(plan.balance), config)
    schedule = make(spec) if found is None else found.schedule
    check(schedule)
    check_calls(schedule, pipeline.on_call)
    return Run(plan, schedule, size, found, note)


def _balanced(config: RunConfig, plan: Plan, size: ModelSize) -> tuple[Plan, str]:
    """With pipeline.balance=auto the plan of the shortest step, R included, and a line about it; else the plan as it is."""
    if config.pipeline.balance != "auto" or config.engine.name != NATIVE or not _tells_of_layers(config):
        return plan, ""
    spec = _spec(config, plan.stage_ranks, _in_parts(config, plan.balance, size))
    costs_of = _costs(config, plan.num_stages, size.flops_per_layer)
    balance = balance_by_step(plan.balance, spec, costs_of)
    return replace(plan, balance=balance), balance_told(balance, plan.balance, spec.policy)


def _tells_of_layers(config: RunConfig) -> bool:
    """Whether costs are known per layer: a run's profile and lists of `cost.*` have them per stage."""
    given = config.plan.profile
    if given is not None:
        return bool(read_profile(given).layers)
    return not any(isinstance(value, tuple) for value in vars(config.cost).values())


@dataclass(frozen=True)
class PreparedPhase(Phase):
    """A phase with what it asks for: its steps are those of `run`. A run without phases is one."""

    run: Run


def prepare_phases(
    config: RunConfig, num_ranks: int | None = None, orders: Sequence[str | None] = ()
) -> tuple[PreparedPhase, ...]:
    """The run of each phase of `config`, as `prepare` makes it. All have the stages of the first: no layer moves in mid-run.

    `orders` are those of pipeline.schedule=auto, one for each phase, where they are known.

    Raises ValueError: as `prepare`, with the phase in front; or phases that do not follow one another.
    """
    check_run(config)
    check_engine(config)
    prepared: list[PreparedPhase] = []
    for phase, order in zip_longest(phases_of(config), orders):
        own = phase.config
        if prepared:
            own = replace(own, pipeline=replace(own.pipeline, balance=prepared[0].run.plan.balance))
        with naming_phase(phase, config):
            run = prepare(own, num_ranks, order)
        prepared.append(PreparedPhase(**vars(phase), run=run))
    return tuple(prepared)


def predict(config: RunConfig, measured: Costs | None = None) -> Shown:
    """The schedule of `config`, simulated on `cost.*`, a profile or what was `measured`. Model and balance are read only for layers.

    Raises ValueError: an unknown family, or numbers out of range or that do not fit each other.
    """
    check_schedule(config)
    pipeline = config.pipeline
    world = world_of(pipeline, config.parallel, config.cluster)
    stage_ranks = place_stages(
        pipeline.placement,
        num_ranks=world.ranks_per_replica,
        num_stages=pipeline.num_stages,
        stages_per_rank=pipeline.stages_per_rank,
    )
    config = _with_replicas(config, world.num_replicas)
    costs, policy = _costs_shown(config, stage_ranks) if measured is None else (measured, policy_of(config))
    spec = replace(_spec(config, stage_ranks, policy), costs=costs)
    if pipeline.schedule == AUTO:
        found = _sought(spec, costs, config)
        return show_schedule(found.schedule, costs, found.least_seconds)
    return show_schedule(make(spec), costs)


def predict_mesh(config: RunConfig, schedule: Schedule) -> tuple[Mesh, str]:
    """The mesh of the replicas that run `schedule`, which `predict` made of `config`; and why what ranks hold and send is not known, where model
    and data do not tell it ("": it is known).

    Raises ValueError: the ranks do not make so many replicas.
    """
    world = world_of(config.pipeline, config.parallel, config.cluster)
    grid = Grid(world.num_replicas, world.ranks_per_replica, order=config.parallel.order)
    config = _with_replicas(config, world.num_replicas)
    try:
        plan, model, unknown = _held(config, schedule)
    except ValueError as error:
        layers = (1,) * schedule.num_stages
        plan = Plan(layers, schedule.stage_ranks, schedule.num_microbatches, world.num_replicas)
        model, unknown = Holds(), str(error)
    mesh = mesh_of(
        plan,
        with_reduces(schedule, plan.tied_stages(model.tied), world.num_replicas),
        grid,
        ranks_per_node=config.cluster.ranks_per_node or -(-grid.size // config.cluster.num_nodes),
        model=model,
        zero=config.parallel.zero_stage if world.num_replicas > 1 else 0,
    )
    return mesh, unknown


def _held(config: RunConfig, schedule: Schedule) -> tuple[Plan, Holds, str]:
    """Where the layers are, what they hold and what goes between them; and what of it is not known."""
    length = config.data.sequence_length
    size = size_of(config.model, sequence_length=length)
    plan = _plan_on(config, schedule.stage_ranks, size, schedule.num_microbatches)
    check_samples(config, plan.num_replicas)
    size = size_of(config.model, vocabulary_size=known_vocabulary(config), sequence_length=length)
    slices = plan.num_replicas * schedule.num_microbatches
    fewest, longer = divmod(config.data.global_batch_size, slices)
    held = Holds(
        parameters=size.parameters_per_layer,
        shapes=size.shapes_per_layer if config.engine.name == NATIVE else None,  # DeepSpeed cuts parameters
        tied=size.tied,
        width=size.width,
        tokens=tuple(length * (fewest + (number < longer)) for number in range(slices)),
        number_bytes=number_bytes_of(config),
    )
    unknown = "the dtype of the weights is that of their file (model.dtype=auto)" if held.number_bytes is None else ""
    if config.model.lora.rank is not None:
        held, unknown = replace(held, number_bytes=None), "adapters alone are trained (model.lora)"
    if size.parameters_per_layer is None:
        unknown = f"the vocabulary is the tokenizer's (data.tokenizer={config.data.tokenizer}); set model.vocab_size to its size"
    return plan, held, unknown


def _plan_on(config: RunConfig, stage_ranks: tuple[int, ...], size: ModelSize, num_microbatches: int) -> Plan:
    """Where the layers are, for stages on these ranks."""
    plan = make_plan(
        size.num_layers,
        num_microbatches=num_microbatches,
        num_replicas=_known_replicas(config),
        balance=config.pipeline.balance,
        work=size.flops_per_layer,
        placement=stage_ranks,
    )
    return _balanced(config, plan, size)[0]


def known_vocabulary(config: RunConfig) -> int | None:
    """The tokens of data.tokenizer=byte; None: another tokenizer's are not known without its file."""
    return 256 if config.data.tokenizer == "byte" else None


def number_bytes_of(config: RunConfig) -> NumberBytes | None:
    """AdamW has two moments of each weight, and float32 masters of one with fewer bits, whose gradient is float32 then."""
    dtype = config.model.dtype or WEIGHTS_IN[config.precision]
    if dtype == "auto":
        return None
    size = 4 if dtype == "float32" else 2
    if size == 2 and config.optim.masters == "auto":
        return NumberBytes(weight=2, gradient=4, optimizer=4 + 2 * 4, boundary=2)
    return NumberBytes(weight=size, gradient=size, optimizer=2 * size, boundary=size)


def _with_replicas(config: RunConfig, num_replicas: int) -> RunConfig:
    """The configuration with their number, where it was `auto`."""
    return replace(config, parallel=replace(config.parallel, num_replicas=num_replicas))


def _known_replicas(config: RunConfig) -> int:
    assert isinstance(config.parallel.num_replicas, int), "`_with_replicas` comes first"
    return config.parallel.num_replicas


def _costs_shown(config: RunConfig, stage_ranks: tuple[int, ...]) -> tuple[Costs, RecomputePolicy]:
    """Costs and policy; by the layers of each stage if a profile knows them or parts depend on them."""
    policy, given = policy_of(config), config.plan.profile
    costs_of, alike = _costs(config, len(stage_ranks)), (1,) * len(stage_ranks)
    knows_layers = given is not None and bool(read_profile(given).layers)
    if not knows_layers and not (policy.in_parts and isinstance(policy.segments, str)):
        return costs_of(alike), policy
    size = size_of(config.model, sequence_length=config.data.sequence_length)
    balance = _plan_on(config, stage_ranks, size, config.pipeline.num_microbatches).balance
    return costs_of(balance if knows_layers else alike), _in_parts(config, balance, size)


def _in_parts(config: RunConfig, balance: tuple[int, ...], size: ModelSize) -> RecomputePolicy:
    """The policy for stages of so many layers: their parts have about equal bytes by the profile, and without one equal work."""
    policy, given = policy_of(config), config.plan.profile
    if not policy.in_parts:
        return policy
    work = sizes = size.flops_per_layer
    if given is not None:
        profile = profile_of(config)
        if profile.layers:
            work, sizes = seconds_of_layers(profile), bytes_of_layers(profile)
    return policy.of_layers(balance, None if sizes is None else cut_by_work(sizes, balance), work)


def _costs(config: RunConfig, num_stages: int, work: Sequence[float] | None = None) -> Callable[[Sequence[int]], Costs]:
    """What stages of a balance cost: those of the run, or of the layers, that `plan.profile` names, else shares of `cost.*` by `work`."""
    given = config.plan.profile
    if given is not None:
        profile = profile_of(config)
        check_profile(given, profile, num_stages, config.pipeline.num_microbatches)
        if (measured := profile.costs) is not None:
            return lambda _: measured
        policy = policy_of(config)
        policy.check_layers(profile.num_layers)
        selective = () if policy.mode is Mode.NEVER else policy.selective
        replicas = _known_replicas(config)
        return lambda balance: costs_of_layers(profile, balance, selective, replicas)
    keys = {key.removesuffix("_seconds"): value for key, value in vars(config.cost).items()}  # an argument for each
    mean = Costs.spread(num_stages, **keys)
    return (lambda balance: costs_by_work(balance, work, mean)) if _tells_of_layers(config) else lambda _: mean


def profile_of(config: RunConfig) -> Profile:
    """What `plan.profile` names, for microbatches of this run.

    Raises ValueError: there is none, or layers were measured with something else than this configuration; with the key that differs.
    """
    given = config.plan.profile or PROFILE
    profile = read_profile(given)
    if not profile.layers:
        return profile
    wanted = conditions_of(config)
    samples = wanted[_SAMPLES]
    if profile.smaller:
        del wanted[_SAMPLES]
    check_conditions(given, profile, wanted)
    profile = profile.keeping(policy_of(config).keep_layers)
    return profile.at(samples) if profile.smaller else profile


def foreseen_bytes(config: RunConfig, run: Run, kept: Path) -> tuple[int, ...]:
    """Per rank of a replica the most bytes of activations in a step, by the layers that `plan.profile` names, else by those that a planned
    run has `kept`; nothing where neither tells of layers like these."""
    given = config.plan.profile or (str(kept) if kept.is_file() else None)
    if given is None:
        return ()
    config = _with_replicas(replace(config, plan=replace(config.plan, profile=given)), run.plan.num_replicas)
    with suppress(ValueError):
        profile, plan, schedule = profile_of(config), run.plan, run.schedule
        if profile.layers:
            holdings = Holdings(proves=config.recompute.verify != OFF)
            held = Footprint(profile, plan.balance, schedule.policy, plan.num_microbatches, holdings)
            return held.of_step(schedule, simulate(schedule, _costs(config, plan.num_stages)(plan.balance)))
    return ()


def conditions_of(config: RunConfig) -> dict[str, Any]:
    """What times and bytes of layers depend on, by its key: they hold for a run that has the same. The number of replicas is known."""
    model = {f"model.{key}": value for key, value in asdict(config.model).items() if key not in _NO_WORK_OF_LAYERS}
    if config.model.name != PYTHON:  # a profile of an older version does not have its keys
        model = {key: value for key, value in model.items() if value != {}}
    installed = {"torch": version("torch")} if find_spec("torch") else {}  # a login node may have none
    samples = -(-config.data.global_batch_size // (_known_replicas(config) * config.pipeline.num_microbatches))
    return {
        **model,
        "precision": config.precision,
        "data.sequence_length": config.data.sequence_length,
        _SAMPLES: samples,
        "threads_per_rank": config.threads_per_rank,
        **installed,
    }


def _sought(spec: ScheduleSpec, costs: Costs, config: RunConfig) -> FoundSchedule:
    """The best order for the costs; the user's cache holds the results of earlier searches."""
    return best_schedule(spec, costs, Effort(config.pipeline.search_seconds), user_cache("orders"), say)


def _refuse_profile_without_layers(config: RunConfig) -> None:
    given = config.plan.profile
    if given is not None and config.pipeline.schedule != AUTO and not read_profile(given).layers:
        segments = config.recompute.segments
        cut = f"holds, by which recompute.segments={segments} cuts a stage"
        what = "takes, by which pipeline.balance=auto shares layers out" if segments == 1 else cut
        raise ValueError(
            f"plan.profile={given}: a run's ops do not say what each layer {what}; measure the layers with `pipetrain profile`, or leave "
            "plan.profile out"
        )


def _spec(config: RunConfig, stage_ranks: tuple[int, ...], policy: RecomputePolicy) -> ScheduleSpec:
    """What the schedule of `config` is made from, once its number of replicas is known."""
    given = config.pipeline.schedule  # or the function that it names
    is_ours = given in (*FAMILIES, AUTO) or given.endswith(".csv") or not is_extension(given, SCHEDULES)
    return ScheduleSpec(
        family=given if is_ours else load_extension("pipeline.schedule", given, SCHEDULES),
        stage_ranks=stage_ranks,
        num_microbatches=config.pipeline.num_microbatches,
        policy=policy,
        split_backward=config.pipeline.split_backward,
        warmup=config.pipeline.warmup,
        num_replicas=_known_replicas(config),
        transport_ahead=config.transport.prefetch,
    )


def policy_of(config: RunConfig) -> RecomputePolicy:
    policy = RecomputePolicy(**asdict(config.recompute))  # a field per key; it makes enums of text itself
    num_replicas = config.parallel.num_replicas
    return policy if isinstance(num_replicas, str) else policy.for_replicas(num_replicas)
