"""Measured against simulated, for every family of schedules: what `pipetrain show` says is what a step takes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

from ..emulated import EmulatedWorkload
from ..ranks import run_ranks
from ..result import Options, Result, Table, Target
from ..trial import OpSeconds, measure_hop, measure_ops

CLAIM = "the simulated step is the measured one, within 4 % for every family"
FAMILIES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))  # and the stages that each rank holds
MODES = (Mode.NEVER, Mode.INLINE, Mode.OVERLAP)
LIMIT = 0.04
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One schedule: `stages` stages over `stages // stages_per_rank` ranks."""

    family: str
    stages_per_rank: int
    stages: int
    mode: Mode

    @property
    def ranks(self) -> int:
        return self.stages // self.stages_per_rank

    def __str__(self) -> str:
        return f"{self.family} {self.mode}, {self.stages} stages on {self.ranks} ranks"


def run(options: Options) -> Result:
    sizes: Sequence[int] = (2,) if options.quick else (2, 4, 8)
    cases = [
        Case(family, per_rank, stages, mode)
        for stages, (family, per_rank), mode in itertools.product(sizes, FAMILIES, MODES)
    ]
    workload = EmulatedWorkload(2)
    ops, hop = measure_ops(workload), measure_hop(workload)
    rounds: dict[Case, list[float]] = {case: [] for case in cases}
    for _, case in itertools.product(range(options.rounds), cases):
        rounds[case].append(run_ranks(case.ranks, measure, case)[0])
    predicted = {case: simulate(_schedule(case), _costs(case, ops, hop)).step_seconds for case in cases}
    errors = {case: predicted[case] / statistics.median(rounds[case]) - 1 for case in cases}
    return Result(
        name="simulated",
        claim=CLAIM,
        settings={"rounds": options.rounds, "op_seconds": asdict(ops), "hop_seconds": hop, "workload": vars(workload)},
        tables=[_table(cases, rounds, predicted, errors)],
        targets=[Target(f"{case}: |simulated / measured - 1|", abs(errors[case]), LIMIT) for case in cases],
        data={str(case): {"measured": rounds[case], "simulated": predicted[case]} for case in cases},
    )


def measure(case: Case) -> float | None:
    """On one rank: the median step, from the first F, R or B of any rank to the last; on rank 0."""
    workload = EmulatedWorkload(case.stages)
    with Pipeline(
        workload.layers(),
        workload.loss,
        num_microbatches=workload.num_microbatches,
        schedule=case.family,
        recompute=case.mode,
        balance=workload.balance(),
        stages_per_rank=case.stages_per_rank,
        timeout_seconds=60.0,
    ) as pipeline:
        inputs, targets = workload.batch()
        seconds = []
        for _ in range(STEPS + 1):
            if dist.is_initialized():
                dist.barrier()
            pipeline.step(inputs, targets)
            report = pipeline.gather_report()
            seconds.append(None if report is None else report.step_seconds)
    timed = [step for step in seconds[1:] if step is not None]  # the first step describes its messages
    return statistics.median(timed) if timed else None


def _schedule(case: Case) -> Any:
    return make_schedule(
        case.family,
        num_stages=case.stages,
        num_microbatches=EmulatedWorkload(case.stages).num_microbatches,
        num_ranks=case.ranks,
        recompute=case.mode,
    )


def _costs(case: Case, ops: OpSeconds, hop: float) -> Costs:
    """What one stage alone took; a hop is nothing between stages of one rank, where there is no other."""
    return Costs.spread(
        case.stages,
        forward=ops.forward,
        backward=ops.backward,
        recompute=ops.recompute,
        hop=hop if case.ranks > 1 else 0.0,
    )


def _table(
    cases: Sequence[Case], rounds: dict[Case, list[float]], predicted: dict[Case, float], errors: dict[Case, float]
) -> Table:
    unit = EmulatedWorkload(2).forward_seconds
    rows = tuple(
        (
            str(case),
            f"{statistics.median(rounds[case]) / unit:.2f}",
            f"{predicted[case] / unit:.2f}",
            f"{errors[case]:+.1%}",
        )
        for case in cases
    )
    title = (
        f"emulated stages, 8 microbatches, units of f = {unit * 1e3:g} ms; simulated from one stage and one hop alone"
    )
    return Table(title, ("", "measured", "simulated", "error"), rows)
