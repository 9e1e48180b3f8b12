"""Steps that `pipetrain plan` predicts beside the same steps measured: emulated layers of random unequal times, and a GPT."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.spec import spec_of
from pipetrain.plan.plan import make_plan
from pipetrain.plan.planner import make_plans
from pipetrain.plan.profile import Profile
from pipetrain.plan.space import Choice, PlanProblem
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.profiling import profile_layers
from pipetrain.schedule.policy import OFF, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate
from pipetrain.trainer.links import measure_links

from ..emulated import EmulatedStage, EmulatedWorkload
from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target
from ..transformer import TransformerWorkload

CLAIM = "a predicted step is as long as a measured one, and the fastest of ten settings is among the first three of the plan"
MOST_OFF, MOST_OFF_GPT, LEAST_FOUND = 0.05, 0.15, 0.9
_SETTINGS, _MODELS, _FIRST = 10, 10, 3
_SPLIT_SHARE = 0.4  # of an emulated backward, as the planner takes it
_BYTES, _SAVED = 250_000, 4  # of a message; tensors of this size in the set of a layer
_HELD = {"parallel.num_replicas": 1}


@dataclass(frozen=True)
class Emulated:
    """Layers that sleep so many seconds forward and twice that backward."""

    seconds: tuple[float, ...]
    num_microbatches: int = 6
    rows: int = 1

    @staticmethod
    def random(seed: int, *, quick: bool) -> Emulated:
        chance = random.Random(seed)
        least, most = (0.002, 0.008) if quick else (0.006, 0.02)
        return Emulated(tuple(chance.uniform(least, most) for _ in range(chance.randint(5, 8))), 2 if quick else 6)

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [functools.partial(_layer, own) for own in self.seconds]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.num_microbatches, _BYTES // 4), torch.zeros(self.num_microbatches, 1)

    loss = staticmethod(EmulatedWorkload.loss)


def _layer(seconds: float) -> nn.Module:
    weights = _SPLIT_SHARE * 2 * seconds
    return EmulatedStage(seconds, 2 * seconds, weights, num_saved=_SAVED, is_written=True)


Model = Emulated | TransformerWorkload


@dataclass(frozen=True)
class Pair:
    """One setting, and both steps in seconds."""

    setting: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        return abs(self.predicted / self.measured - 1)


def run(options: Options) -> Result:
    preload()
    result = Result("plan", CLAIM, settings={"rounds": options.rounds, "quick": options.quick})
    models = [Emulated.random(seed, quick=options.quick) for seed in range(1 if options.quick else _MODELS)]
    settings = 2 if options.quick else _SETTINGS
    pairs = [compare(model, 2 + number % 2, settings, options) for number, model in enumerate(models)]
    found = sum(is_found(own) for own in pairs) / len(pairs)
    result.tables.append(_table("emulated layers, the first setting of each model", [own[0] for own in pairs]))
    off = [pair.off for own in pairs for pair in own]
    result.targets += [
        Target("emulated: median |predicted / measured - 1|", statistics.median(off), MOST_OFF),
        Target("emulated: most of these", max(off), MOST_OFF),
        Target("models whose fastest setting is not among the first three", 1 - found, 1 - LEAST_FOUND),
    ]
    if not options.quick:
        gpt = TransformerWorkload(
            2, num_microbatches=6, rows=1, model=ModelConfig(num_hidden_layers=6, hidden_size=512)
        )
        own = compare(gpt, 2, settings, replace(options, rounds=options.rounds + 2), beside=True)
        result.tables.append(_table("a GPT of 6 blocks, hidden 512", own))
        result.targets.append(
            Target("GPT: most |predicted / measured - 1|", max(pair.off for pair in own), MOST_OFF_GPT)
        )
        pairs.append(own)
    result.data["pairs"] = [[vars(pair) for pair in own] for own in pairs]
    return result


def compare(model: Model, ranks: int, settings: int, options: Options, *, beside: bool = False) -> list[Pair]:
    """Settings of a model, from the fastest plan to the slowest, all measured by the same processes.

    `beside`: predicted from profiles right before and after the steps of a setting, for the speed of a processor changes within minutes.
    """
    profile = run_ranks(ranks, profiled, model, timeout_seconds=300.0)[0]
    problem = PlanProblem(profile, model.num_microbatches, ranks, model.num_microbatches, held=_HELD)
    plans = make_plans(problem).plans
    chosen = plans[:: max(1, len(plans) // settings)][:settings]
    given = [(one.choice.balance, one.schedule) for one in chosen]
    found = run_ranks(ranks, measured, model, given, options.rounds, beside, timeout_seconds=600.0)[0]
    pairs = []
    for one, (seconds, profiles) in zip(chosen, found):
        costs = [costs_of_layers(near, one.choice.balance) for near in profiles]
        predicted = [simulate(one.schedule, near).step_seconds for near in costs] or [one.step_seconds]
        pairs.append(Pair(_named(one.choice), statistics.fmean(predicted), seconds))
    return pairs


def _named(choice: Choice) -> str:
    """Schedule, layers per stage, and what is recomputed."""
    recomputed = "never" if choice.mode is Mode.NEVER else f"sets {choice.sets}, segments {choice.segments}"
    halves = ", split" if choice.split_backward else ""
    return f"{choice.schedule}{halves}, {'-'.join(map(str, choice.balance))}, {recomputed}"


def is_found(pairs: Sequence[Pair]) -> bool:
    """Whether the fastest is among the first three of the plan; what is within 1 % of it is as fast."""
    best = min(pair.measured for pair in pairs)
    first = sorted(pairs, key=lambda pair: pair.predicted)[:_FIRST]
    return min(pair.measured for pair in first) <= 1.01 * best


def profiled(model: Model) -> Profile:
    """As `pipetrain profile` has it: the layers, measured by as many processes at once as the pipeline has, and on rank 0 their link."""
    torch.set_num_threads(1)
    spec = spec_of([build() for build in model.layers()]).for_loss(model.loss)
    given, wanted = (one[: model.rows] for one in model.batch())
    layers = profile_layers(spec, given, wanted, device=torch.device("cpu"), loss_fn=model.loss)
    links = measure_links(dist.get_world_size())
    return Profile(layers=layers, link=links.edges[0] if links else None)


def measured(
    model: Model, settings: Sequence[tuple[tuple[int, ...], Schedule]], rounds: int, beside: bool
) -> list[tuple[float, list[Profile]]]:
    """On rank 0, of each setting the median step of all ranks, a first step not counted; and `beside` it a profile before and after."""
    torch.set_num_threads(1)
    profiles, found = [profiled(model)] if beside else [], []
    for balance, schedule in settings:
        seconds = _measured(model, balance, schedule, rounds)
        profiles += [profiled(model)] if beside else []
        found.append((seconds, profiles[-2:]))
    return found


def _measured(model: Model, balance: tuple[int, ...], schedule: Schedule, rounds: int) -> float:
    plan = make_plan(
        sum(balance),
        balance=balance,
        placement=schedule.stage_ranks,
        num_microbatches=schedule.num_microbatches,
    )
    policy = RecomputePolicy(
        **{**vars(schedule.policy), "verify": OFF}
    )  # an emulated layer saves memory that nobody has written
    seconds = []
    with Pipeline(model.layers(), model.loss, plan=plan, schedule=schedule, recompute=policy) as pipeline:
        inputs, targets = model.batch()
        for _ in range(1 + rounds):
            dist.barrier()
            pipeline.step(inputs, targets)
            if (report := pipeline.gather_report()) is not None:
                seconds.append(report.step_seconds)
    return statistics.median(seconds[1:]) if seconds else 0.0


def _table(title: str, pairs: Sequence[Pair]) -> Table:
    rows = tuple((pair.setting, f"{pair.predicted:.3f}", f"{pair.measured:.3f}", f"{pair.off:.1%}") for pair in pairs)
    return Table(title, ("", "predicted s", "measured s", "off"), rows)
