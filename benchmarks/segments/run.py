"""Stages recomputed in parts: what a step takes with a set and a half, and with half a set, and the square-root law."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.policy import LAYERS as LAYER_BY_LAYER
from pipetrain.schedule.policy import SQRT, LastStage, Mode, RecomputePolicy
from pipetrain.schedule.simulate import simulate

from ..awake import awake
from ..emulated import EmulatedWorkload
from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target
from ..systems import Ours, System, TorchPipelining
from ..trial import Row, run_rounds

CLAIM = "with parts a stage that holds half a set takes 1.4 of the time of all sets at most, and sqrt(n) parts hold sqrt(n) layers"
ALL_SETS = TorchPipelining("1f1b", recomputes=False)
MOST_OF_SIMULATED, MOST_OF_R = 0.04, 1.05
SEGMENTS, LAYERS = 4, 12
NUM_LAYERS = (16, 64, 256)
WIDTH, ROWS = 256, 256  # a layer of some milliseconds, as those of the smallest transformers
PASS_SEQUENCES: tuple[int | str, ...] = (1, SQRT, LAYER_BY_LAYER)


@dataclass(frozen=True)
class Case:
    """A row of ours, and what it may take of the step that keeps all sets."""

    system: Ours
    limit: float


def cases() -> list[Case]:
    """Half a set with four microbatches of four inputs; a set and a half, of which a quarter is inputs."""
    half = {"sets": 0.5, "stash": 4, "segments": SEGMENTS}
    return [
        Case(Ours("1f1b", Mode.INLINE, **half, label="1f1b inline, half a set"), 1.40),  # type: ignore[arg-type]
        Case(Ours("1f1b", **half, label="1f1b, half a set"), 1.40),  # type: ignore[arg-type]
        Case(
            Ours(
                "auto",
                sets=1.25,
                stash=12,
                segments=SEGMENTS,
                order=Path(__file__).with_name("order.csv").read_text(),
                label="auto, 1.5 sets in all",
            ),
            1.13,
        ),
    ]


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    result = Result("segments", CLAIM, settings={"rounds": options.rounds, "segments": SEGMENTS})
    _measure_time(result, options)
    _measure_law(result, NUM_LAYERS[:1] if options.quick else NUM_LAYERS, quick=options.quick)
    return result


# Time -----------------------------------------------------------------------------------------------------------------


def _measure_time(result: Result, options: Options) -> None:
    load = EmulatedWorkload(4, 16, forward_seconds=0.12, backward_seconds=0.24, layers_per_stage=LAYERS)
    wanted = cases()
    if options.quick:
        load, wanted = EmulatedWorkload(2, 4, layers_per_stage=LAYERS), wanted[:1]
    systems: list[System] = [ALL_SETS, *(case.system for case in wanted)]
    with awake():
        first, *rows = run_rounds(systems, load, rounds=options.rounds, steps=1)
    lines = [(first.system.name, f"{first.median_seconds:.3f}", f"{first.spread:.1%}", "1.000", "")]
    for row, case in zip(rows, wanted):
        ratio, foreseen = row.median_seconds / first.median_seconds, _simulated(row, load)
        off = abs(foreseen / statistics.median(row.rounds[1:] or row.rounds) - 1)
        lines.append(
            (row.system.name, f"{row.median_seconds:.3f}", f"{row.spread:.1%}", f"{ratio:.3f}", f"{foreseen:.3f}")
        )
        result.targets += [
            Target(f"{row.system.name} / {first.system.name}", ratio, case.limit),
            Target(f"{row.system.name}: |simulated / measured - 1|", off, MOST_OF_SIMULATED),
        ]
    title = f"{load.num_stages} stages of {LAYERS} layers in {SEGMENTS} parts, {load.num_microbatches} microbatches"
    result.tables.append(Table(title, ("", "seconds", "spread", "x all sets", "simulated"), tuple(lines)))
    result.data["time"] = [row.to_json() for row in (first, *rows)]


def _simulated(row: Row, load: EmulatedWorkload) -> float:
    """Seconds, from what the ops of the first round took."""
    account, system = row.trials[0].account, row.system
    assert isinstance(system, Ours)
    assert account is not None
    assert account.costs is not None
    return simulate(system.schedule(load), account.costs).step_seconds


# Memory ---------------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """The feed-forward part of a transformer's block: its set is its input and eight times that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = given + self.down(nn.functional.gelu(self.up(given)))
        return output


@dataclass(frozen=True)
class _Stacks:
    """Stages of equal layers on one rank, by `PASS_SEQUENCES`: the most bytes of activations, and of each step the seconds of a microbatch's R,
    all parts together, in the middle."""

    peak_bytes: dict[int | str, int]
    recompute_seconds: dict[int | str, list[float]]

    def share(self, way: int | str) -> float:
        """Of one whole R of the same turn."""
        whole, own = (self.recompute_seconds[one] for one in (1, way))
        return statistics.median(mine / theirs for mine, theirs in zip(own, whole, strict=True))


def _measure_law(result: Result, sizes: Sequence[int], *, quick: bool) -> None:
    for num_stages in (1, 2):
        lines, held, shares = [], [], {}
        for size in sizes:
            steps = 1 if quick else max(4, 256 // size)
            ranks: list[_Stacks] = run_ranks(num_stages, _measure_stacks, size, steps, timeout_seconds=900.0)
            peaks = {way: max(rank.peak_bytes[way] for rank in ranks) for way in PASS_SEQUENCES}
            shares[size] = {way: max(rank.share(way) for rank in ranks) for way in PASS_SEQUENCES}
            held.append(peaks[SQRT])
            lines.append(
                (
                    f"{size}",
                    *(f"{peaks[way] / 1e6:.2f}" for way in PASS_SEQUENCES),
                    *(f"{shares[size][way]:.3f}" for way in PASS_SEQUENCES[1:]),
                )
            )
            what = f"{_stages(num_stages)}, {size} layers: R of sqrt parts / one whole R"
            result.targets.append(Target(what, shares[size][SQRT], MOST_OF_R))
            bound = _inputs_and_a_layer(size // num_stages)
            what = f"{_stages(num_stages)}, {size} layers: bytes of `layers` / inputs and one layer"
            result.targets.append(Target(what, peaks[LAYER_BY_LAYER] / bound, 1.0))
        headers = ("layers", "whole MB", "sqrt MB", "layers MB", "R sqrt / whole", "R layers / whole")
        title = f"{_stages(num_stages)} of feed-forward layers, {WIDTH} wide, 4 x {ROWS} rows, R on the last stage too; the fullest or slowest rank"
        result.tables.append(Table(title, headers, tuple(lines)))
        if len(sizes) > 1:
            slope = math.log(held[-1] / held[0]) / math.log(sizes[-1] / sizes[0])
            what = f"{_stages(num_stages)}: |exponent of bytes in layers - 0.5|, sqrt parts"
            result.targets.append(Target(what, abs(slope - 0.5), 0.1))
        result.data[f"law, {_stages(num_stages)}"] = {
            str(size): {"peak_bytes": peak, "shares_of_r": {str(way): share for way, share in shares[size].items()}}
            for size, peak in zip(sizes, held)
        }


def _stages(number: int) -> str:
    return "one stage" if number == 1 else f"{number} stages"


def _inputs_and_a_layer(layers: int) -> int:
    """Bytes: the input of each layer for each of four microbatches, and what one layer saves besides: eight times as much. Of the
    loss, and of what comes from another stage and goes there, no more than six such tensors."""
    tensor = ROWS * WIDTH * 4
    return (4 * layers + 8 + 6) * tensor


def _measure_stacks(size: int, steps: int) -> _Stacks:
    """On one rank, steps of all ways in turns; those after the first, in which R is proved."""
    torch.manual_seed(0)
    layers = [_Layer() for _ in range(size)]
    inputs = torch.randn(4 * ROWS, WIDTH)
    taken: dict[int, float] = defaultdict(float)
    seconds: dict[int | str, list[float]] = {way: [] for way in PASS_SEQUENCES}
    peaks: dict[int | str, int] = {}

    def add(event: OpEvent) -> None:
        if event.op.kind is Kind.R:
            taken[event.op.microbatch or 0] += event.end - event.start

    with ExitStack() as stack:
        pipelines = {
            way: stack.enter_context(
                Pipeline(
                    layers,
                    nn.functional.mse_loss,
                    num_microbatches=4,
                    recompute=RecomputePolicy(Mode.INLINE, segments=way, last_stage=LastStage.ALWAYS),
                    on_event=add,
                )
            )
            for way in PASS_SEQUENCES
        }
        for step in range(steps + 1):
            for way, pipeline in pipelines.items():
                taken.clear()
                pipeline.step(inputs, inputs)
                peaks[way] = pipeline.report.peak_activation_bytes
                if step > 0:
                    seconds[way].append(statistics.median(taken.values()))
    return _Stacks(peaks, seconds)
