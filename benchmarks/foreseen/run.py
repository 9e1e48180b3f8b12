"""What `pipetrain profile` says of stages beside what they hold and take; and what the meter counts beside the process."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.config.records import ModelConfig
from pipetrain.models.spec import ModelSpec, spec_of
from pipetrain.models.transformer import Block, transformer_spec
from pipetrain.plan.profile import Profile
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.profiling import profile_layers
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.stage import Stage

from ..ranks import preload, run_ranks
from ..resident import MODELS, Grown, measure
from ..result import Options, Result, Table, Target

CLAIM = "layers measured alone say what stages of them hold and what their R takes, and the meter says what a process grows by"
CPU = torch.device("cpu")
MOST_OF_BYTES, MOST_OF_R = 0.02, 0.10
MOST_OF_KEPT_BYTES, MOST_OF_SELECTIVE_R = 0.05, 0.4
MOST_OF_RESIDENT, LEAST_SET = 0.15, 200e6
VOCABULARY = 256


def run(options: Options) -> Result:
    preload()
    result = Result("foreseen", CLAIM, settings={"rounds": options.rounds, "quick": options.quick})
    _foresee_stages(result, options)
    _leave_out_products(result, options)
    _grow(result, options)
    return result


# Stages, from their layers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, its microbatch, and the layers of its two stages."""

    name: str
    model: ModelConfig
    rows: int
    sequence_length: int
    balance: tuple[int, int]

    def spec(self) -> ModelSpec:
        return transformer_spec(self.model, VOCABULARY)

    def tokens(self, num_microbatches: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        most = self.model.vocab_size or VOCABULARY
        return torch.randint(most, (num_microbatches * self.rows, self.sequence_length), generator=generator)


CASES = (
    Case("Llama", ModelConfig(num_hidden_layers=6, hidden_size=256, num_attention_heads=8), 2, 256, (4, 4)),
    Case("GPT-2, dropout 0.1", ModelConfig(name="gpt2", num_hidden_layers=6, hidden_size=256, num_attention_heads=8, dropout=0.1), 2, 256, (4, 4)),
    Case("Llama, 8192 tokens", ModelConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=8, vocab_size=8192), 2, 256, (4, 2)),
)  # fmt: skip
QUICK = Case("Llama", ModelConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2), 1, 32, (2, 2))


@dataclass(frozen=True)
class Stages:
    """Of a stage: what its layers alone said, and what it did in a pipeline; bytes of a set, seconds of R."""

    foreseen_bytes: float
    metered_bytes: float
    foreseen_seconds: float
    measured_seconds: float
    seconds_ratio: float  # of the median round

    @property
    def bytes_off(self) -> float:
        return self.foreseen_bytes / self.metered_bytes - 1

    @property
    def seconds_off(self) -> float:
        return self.seconds_ratio - 1


def _foresee_stages(result: Result, options: Options) -> None:
    lines = []
    for case in (QUICK,) if options.quick else CASES:
        for stage, found in enumerate(foresee(case, options.rounds, steps=1 if options.quick else 4)):
            lines.append(
                (
                    f"{case.name}, stage {stage}",
                    f"{found.foreseen_bytes / 1e6:.2f}",
                    f"{found.metered_bytes / 1e6:.2f}",
                    f"{found.bytes_off:+.2%}",
                    f"{found.foreseen_seconds * 1e3:.1f}",
                    f"{found.measured_seconds * 1e3:.1f}",
                    f"{found.seconds_off:+.1%}",
                )
            )
            where = f"{case.name}, stage {stage}"
            result.targets += [
                Target(f"{where}: |foreseen / metered bytes - 1|", abs(found.bytes_off), MOST_OF_BYTES),
                Target(f"{where}: |foreseen / measured R - 1|", abs(found.seconds_off), MOST_OF_R),
            ]
            result.data[where] = asdict(found)
    headers = ("", "set MB foreseen", "metered", "off", "R ms foreseen", "measured", "off")
    result.tables.append(Table("stages in a pipeline, foreseen from their layers alone", headers, tuple(lines)))


def foresee(case: Case, rounds: int, *, steps: int) -> list[Stages]:
    """Layers and stages by turns, each in processes of their own; the medians.

    As many processes measure layers at once as the pipeline has: they share the memory of the machine as its stages do.
    """
    seconds: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    sizes: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for _ in range(rounds):
        alone = run_ranks(2, _alone, case, 3 if steps == 1 else 9, timeout_seconds=600.0)
        together = run_ranks(2, _together, case, steps, timeout_seconds=600.0)
        seconds["foreseen"].append(tuple(of_stages[stage] for stage, (_, of_stages) in enumerate(alone)))
        sizes["foreseen"].append(tuple(of_stages[stage] for stage, (of_stages, _) in enumerate(alone)))
        seconds["measured"].append(tuple(rank[1] for rank in together))
        sizes["metered"].append(tuple(rank[0] for rank in together))
    return [
        Stages(
            sizes["foreseen"][0][stage],
            sizes["metered"][0][stage],
            statistics.median(one[stage] for one in seconds["foreseen"]),
            statistics.median(one[stage] for one in seconds["measured"]),
            statistics.median(
                one[stage] / other[stage] for one, other in zip(seconds["foreseen"], seconds["measured"])
            ),
        )
        for stage in range(2)
    ]


def _alone(case: Case, rounds: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes of a set and seconds of R of each stage, as `pipetrain profile` foresees them."""
    torch.set_num_threads(1)
    given = case.tokens(1)
    layers = profile_layers(case.spec(), given, given, device=CPU, rounds=rounds)
    costs = costs_of_layers(Profile(layers=layers), case.balance)
    return costs.set_bytes, costs.recompute


def _together(case: Case, steps: int) -> tuple[float, float]:
    """Of this rank's stage, in a pipeline, from the second step on."""
    torch.set_num_threads(1)
    microbatches = 4
    seconds: list[float] = []

    def add(event: OpEvent) -> None:
        if event.op.kind is Kind.R:
            seconds.append(event.end - event.start)

    policy = RecomputePolicy(Mode.INLINE, last_stage=LastStage.ALWAYS)
    given = case.tokens(microbatches)
    with Pipeline(
        case.spec(),
        num_microbatches=microbatches,
        balance=list(case.balance),
        recompute=policy,
        on_event=add,
    ) as pipeline:
        pipeline.step(given, given)
        seconds.clear()
        for _ in range(steps):
            pipeline.step(given, given)
        report = pipeline.report
        # The first stage's inputs are views of one batch.
        own_input = given.nbytes // microbatches if pipeline.is_first else report.input_bytes
    return report.set_bytes + own_input, statistics.median(seconds)


# Products that R leaves out --------------------------------------------------------------------------------------------


def _leave_out_products(result: Result, options: Options) -> None:
    """R of a block that keeps the outputs of its products, beside a whole one; gradients bit for bit."""
    hidden, length = (64, 32) if options.quick else (1024, 512)
    whole, kept, foreseen, is_equal = run_ranks(1, _block, hidden, length, 9, timeout_seconds=600.0)[0]
    share = kept.seconds / whole.seconds
    lines = tuple(
        (name, f"{one.seconds * 1e3:.1f}", f"{one.seconds / whole.seconds:.3f}", f"{one.kept_bytes / 1e6:.2f}", held)
        for name, one, held in (("whole", whole, ""), ("recompute.selective=matmul", kept, f"{foreseen / 1e6:.2f}"))
    )
    title = f"a Llama block, hidden {hidden}, one sequence of {length} tokens, dropout 0, one thread; medians of 9"
    result.tables.append(Table(title, ("", "R ms", "of whole", "kept MB", "foreseen"), lines))
    result.targets += [
        Target("selective R / whole R", share, MOST_OF_SELECTIVE_R),
        Target("|foreseen / kept bytes - 1|", abs(foreseen / kept.kept_bytes - 1), MOST_OF_KEPT_BYTES),
        Target("gradients that differ in a bit, of all", 0.0 if is_equal else 1.0, 0.0),
    ]
    result.data["block"] = {"whole": asdict(whole), "matmul": asdict(kept), "foreseen_bytes": foreseen}


@dataclass(frozen=True)
class Recomputed:
    """Of one block: the median R, and what stays for it besides its input."""

    seconds: float
    kept_bytes: int


class _Twice(nn.Module):
    """Needs its input in its backward, so that R of what is before it runs to its end."""

    def forward(self, given: Tensor) -> Tensor:
        return given * given


def _block(hidden: int, length: int, turns: int) -> tuple[Recomputed, Recomputed, float, bool]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = Block(ModelConfig(hidden_size=hidden, num_attention_heads=16))
    given = torch.randn(1, length, hidden)
    selective = RecomputePolicy(selective="matmul").selective  # type: ignore[arg-type]
    stages = []
    for wanted in ((), selective):
        meter = ActivationMeter()
        meter.exclude(block.parameters())
        stages.append(
            Stage(0, [block, _Twice()], first_layer=0, device=CPU, meter=meter, selective=wanted, loss_fn=None)
        )
    seconds: list[list[float]] = [[], []]
    gradients: list[list[Tensor]] = []
    for turn in range(turns + 1):  # the first is proved
        for stage, taken in zip(stages, seconds):
            block.zero_grad()
            leaves, spec = pytree.tree_flatten(given)
            inputs = StageInput(tuple(leaves), spec, frozenset({0}), list)
            output = stage.forward(0, inputs, keep=False, prove=not turn).leaves[0]
            start = time.thread_time()
            stage.recompute(0)
            taken.append(time.thread_time() - start)
            stage.backward(0, [torch.ones_like(output)])
            gradients.append([one.grad.clone() for one in block.parameters() if one.grad is not None])
            del gradients[:-2]
    profile = Profile(layers=profile_layers(spec_of([block, _Twice()]), given, device=CPU, rounds=1))
    (foreseen,) = costs_of_layers(profile, [2], selective).kept_bytes
    is_equal = all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    whole, kept = (
        Recomputed(statistics.median(taken[1:]), stage.kept_bytes[0]) for stage, taken in zip(stages, seconds)
    )
    return whole, kept, foreseen, is_equal


# The process -----------------------------------------------------------------------------------------------------------


def _grow(result: Result, options: Options) -> None:
    if sys.platform != "linux":
        result.notes.append("what processes grow by is not measured: /proc is missing")
        return
    models: Sequence[str] = ["perceptron"] if options.quick else list(MODELS)
    found = [measure(model, mode) for model in models for mode in ("never", "overlap")]
    result.tables.append(_table_of_processes(found))
    for one in found:
        result.targets.append(
            Target(f"{one.model}, {one.mode}: |process / meter - 1|", abs(one.ratio - 1), MOST_OF_RESIDENT)
        )
    smallest = min(one.set_bytes for one in found)
    result.targets.append(Target("200 MB / the smallest set", LEAST_SET / smallest, 1.0))
    result.data["resident"] = [asdict(one) for one in found]


def _table_of_processes(found: Sequence[Grown]) -> Table:
    lines = tuple(
        (
            f"{one.model}, {one.mode}",
            *(f"{size / 1e6:.1f}" for size in (one.set_bytes, one.metered, one.grown)),
            f"{one.ratio:.3f}",
        )
        for one in found
    )
    title = (
        "two microbatches; most that a process grows by in a step, from the third on, beside what the meter counts (MB)"
    )
    return Table(title, ("", "a set", "meter", "process", "process / meter"), lines)
