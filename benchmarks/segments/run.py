"""Stages recomputed in parts: what a step takes with a set and a half, and with half a set, and the square-root law."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.policy import SQRT, LastStage, Mode, RecomputePolicy
from pipetrain.schedule.simulate import simulate

from ..emulated import EmulatedWorkload
from ..ranks import preload
from ..result import Options, Result, Table, Target
from ..systems import Ours, System, TorchPipelining
from ..trial import Row, run_rounds

CLAIM = "with parts a stage that holds half a set takes 1.4 of the time of all sets at most, and sqrt(n) parts hold sqrt(n) layers"
ALL_SETS = TorchPipelining("1f1b", recomputes=False)
SEARCH_SECONDS = 20.0
MOST_OF_SIMULATED, MOST_OF_R = 0.04, 1.05
SEGMENTS, LAYERS = 4, 12
NUM_LAYERS = (16, 64, 256)


@dataclass(frozen=True)
class Case:
    """A row of ours, and what it may take of the step that keeps all sets."""

    system: Ours
    limit: float


def cases(search_seconds: float) -> list[Case]:
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
                search_seconds=search_seconds,
                label="auto, 1.5 sets in all",
            ),
            1.15,
        ),
    ]


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    result = Result("segments", CLAIM, settings={"rounds": options.rounds, "segments": SEGMENTS})
    _measure_time(result, options)
    _measure_law(result, NUM_LAYERS[:1] if options.quick else NUM_LAYERS, 1 if options.quick else 4)
    return result


# Time -----------------------------------------------------------------------------------------------------------------


def _measure_time(result: Result, options: Options) -> None:
    load = EmulatedWorkload(4, 16, forward_seconds=0.12, backward_seconds=0.24, layers_per_stage=LAYERS)
    if options.quick:
        load = EmulatedWorkload(2, 4, layers_per_stage=LAYERS)
    wanted = cases(0.0 if options.quick else SEARCH_SECONDS)
    systems: list[System] = [ALL_SETS, *(case.system.sought(load, load.costs()) for case in wanted)]
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
    """Some time of a core, and what B needs of it."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(self.linear(given))


@dataclass(frozen=True)
class _Measured:
    """A stage of some layers: the most bytes of activations, and the seconds of one microbatch's R, all parts together."""

    peak_bytes: int
    recompute_seconds: float


def _measure_law(result: Result, sizes: Sequence[int], steps: int) -> None:
    lines, held = [], []
    for size in sizes:
        whole, parts, layers = (_stack(size, segments, steps) for segments in (1, SQRT, "layers"))
        held.append(parts.peak_bytes)
        share = parts.recompute_seconds / whole.recompute_seconds
        lines.append(
            (
                f"{size}",
                *(f"{one.peak_bytes / 1e6:.2f}" for one in (whole, parts, layers)),
                f"{share:.3f}",
                f"{layers.recompute_seconds / whole.recompute_seconds:.3f}",
            )
        )
        result.targets.append(Target(f"{size} layers: R of sqrt parts / one whole R", share, MOST_OF_R))
    headers = ("layers", "whole MB", "sqrt MB", "layers MB", "R sqrt / whole", "R layers / whole")
    result.tables.append(Table("one stage, 4 microbatches, R on the last stage too", headers, tuple(lines)))
    if len(sizes) > 1:
        slope = math.log(held[-1] / held[0]) / math.log(sizes[-1] / sizes[0])
        result.targets.append(Target("|exponent of bytes in layers - 0.5|, sqrt parts", abs(slope - 0.5), 0.1))
    result.data["law"] = {str(size): peak for size, peak in zip(sizes, held)}


def _stack(size: int, segments: int | str, steps: int) -> _Measured:
    """Of the steps after the first, in which R is proved."""
    torch.manual_seed(0)
    taken: dict[int, float] = defaultdict(float)
    seconds: list[float] = []
    policy = RecomputePolicy(Mode.INLINE, segments=segments, last_stage=LastStage.ALWAYS)
    inputs = torch.randn(4 * 256, 512)

    def add(event: OpEvent) -> None:
        if event.op.kind is Kind.R:
            taken[event.op.microbatch or 0] += event.end - event.start

    with Pipeline(
        [_Layer() for _ in range(size)],
        nn.functional.mse_loss,
        num_microbatches=4,
        recompute=policy,
        on_event=add,
    ) as pipeline:
        for step in range(steps + 1):
            taken.clear()
            pipeline.step(inputs, inputs)
            if step > 0:
                seconds += taken.values()
        peak = pipeline.report.peak_activation_bytes
    return _Measured(peak, statistics.median(seconds))
