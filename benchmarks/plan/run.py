"""Steps that `pipetrain plan` predicts beside the same steps measured: emulated layers of random unequal times, and a GPT."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.spec import spec_of
from pipetrain.plan.plan import make_plan
from pipetrain.plan.planner import make_plans
from pipetrain.plan.profile import LayerProfile, Profile
from pipetrain.plan.space import Choice, PlanProblem
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.profiling import profile_layers
from pipetrain.schedule.policy import OFF, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.trainer.links import measure_links

from ..emulated import EmulatedStage, EmulatedWorkload
from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target
from ..transformer import TransformerWorkload

CLAIM = "a predicted step is as long as a measured one, and the fastest of ten settings is among the first three of the plan"
MOST_OFF, MOST_OFF_GPT, LEAST_FOUND = 0.05, 0.15, 0.9
_SETTINGS, _MODELS, _FIRST = 10, 10, 3
_SPLIT_SHARE = 0.4  # of an emulated backward, as the planner takes it
_BYTES = 250_000
_HELD = {"parallel.num_replicas": 1}


@dataclass(frozen=True)
class Emulated:
    """Layers that sleep so many seconds forward and twice that backward."""

    seconds: tuple[float, ...]
    num_microbatches: int = 6

    @staticmethod
    def random(seed: int, *, quick: bool) -> Emulated:
        chance = random.Random(seed)
        least, most = (0.002, 0.008) if quick else (0.006, 0.02)
        return Emulated(tuple(chance.uniform(least, most) for _ in range(chance.randint(5, 8))), 2 if quick else 6)

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [lambda own=own: EmulatedStage(own, 2 * own, _SPLIT_SHARE * 2 * own) for own in self.seconds]  # type: ignore[misc]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.num_microbatches, _BYTES // 4), torch.zeros(self.num_microbatches, 1)

    loss = staticmethod(EmulatedWorkload.loss)

    def profile(self) -> Profile:
        """What the sleeps take, and nothing else."""
        found = []
        for number, own in enumerate(self.seconds):
            sizes = {
                "saved_bytes": 16 * _BYTES,
                "inner_bytes": 15 * _BYTES,
                "input_bytes": _BYTES,
                "output_bytes": _BYTES,
            }
            times = {"forward_seconds": own, "backward_seconds": 2 * own, "recompute_seconds": own}
            found.append(
                LayerProfile(
                    (number,),
                    "Emulated",
                    **times,
                    **sizes,  # type: ignore[arg-type]
                    recompute_last_seconds=own,
                    selective_seconds=0.0,
                    saves_input=False,
                    saves_output=True,
                    parameter_bytes=4,
                    gradient_bytes=4,
                    optimizer_bytes=8,
                )
            )
        return Profile(layers=tuple(found))


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
    pairs = [compare(model, model.profile(), 2 + number % 2, settings, options) for number, model in enumerate(models)]
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
            2, num_microbatches=6, rows=1, model=ModelConfig(num_hidden_layers=6, hidden_size=256)
        )
        own = compare(gpt, run_ranks(2, profiled, gpt, timeout_seconds=300.0)[0], 2, settings, options)
        result.tables.append(_table("a GPT of 6 blocks, hidden 256", own))
        result.targets.append(
            Target("GPT: most |predicted / measured - 1|", max(pair.off for pair in own), MOST_OFF_GPT)
        )
        pairs.append(own)
    result.data["pairs"] = [[vars(pair) for pair in own] for own in pairs]
    return result


def compare(model: Model, profile: Profile, ranks: int, settings: int, options: Options) -> list[Pair]:
    """Settings of a model, from the fastest plan to the slowest, all measured by the same processes."""
    problem = PlanProblem(profile, model.num_microbatches, ranks, model.num_microbatches, held=_HELD)
    plans = make_plans(problem).plans
    chosen = plans[:: max(1, len(plans) // settings)][:settings]
    given = [(one.choice.balance, one.schedule) for one in chosen]
    steps = run_ranks(ranks, measured, model, given, options.rounds, timeout_seconds=600.0)[0]
    return [Pair(_named(one.choice), one.step_seconds, seconds) for one, seconds in zip(chosen, steps)]


def _named(choice: Choice) -> str:
    """Schedule, layers per stage, and what is recomputed."""
    recomputed = "never" if choice.mode is Mode.NEVER else f"sets {choice.sets}, segments {choice.segments}"
    halves = ", split" if choice.split else ""
    return f"{choice.schedule}{halves}, {'-'.join(map(str, choice.balance))}, {recomputed}"


def is_found(pairs: Sequence[Pair]) -> bool:
    """Whether the fastest is among the first three of the plan; what is within 1 % of it is as fast."""
    best = min(pair.measured for pair in pairs)
    first = sorted(pairs, key=lambda pair: pair.predicted)[:_FIRST]
    return min(pair.measured for pair in first) <= 1.01 * best


def profiled(model: TransformerWorkload) -> Profile:
    """The layers, measured by as many processes at once as the pipeline has, and on rank 0 their link."""
    torch.set_num_threads(1)
    spec = spec_of([build() for build in model.layers()]).for_loss(model.loss)
    given, wanted = (one[: model.rows] for one in model.batch())
    layers = profile_layers(spec, given, wanted, device=torch.device("cpu"), loss_fn=model.loss)
    links = measure_links(dist.get_world_size())
    return Profile(layers=layers, link=links[0] if links else None)


def measured(model: Model, settings: Sequence[tuple[tuple[int, ...], Schedule]], rounds: int) -> list[float]:
    """On rank 0, of each setting the median step of all ranks; a first step is not counted."""
    torch.set_num_threads(1)
    return [_measured(model, balance, schedule, rounds) for balance, schedule in settings]


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
