"""Layers per stage balanced with R counted, compared with equal numbers: seconds of a step, and how much of R is hidden."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipetrain.config.records import ModelConfig
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import OFF, RecomputePolicy

from ..emulated import EmulatedWorkload
from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target
from ..systems import Workload
from ..transformer import TransformerWorkload

CLAIM = "where the last stage recomputes nothing, a step takes less time with the last stage longer than the others"
EQUAL, COUNTED = "equal", "R counted"


@dataclass(frozen=True)
class Case:
    """A model on its stages; `most` is promised of the step, R counted, beside that of equal numbers of layers."""

    name: str
    workload: Workload
    most: float


GPT = TransformerWorkload(2, num_microbatches=16, rows=1, model=ModelConfig(num_hidden_layers=12))
EMULATED = EmulatedWorkload(4, forward_seconds=0.12, backward_seconds=0.24, layers_per_stage=6)
CASES = (
    Case("a GPT of 12 blocks, 2 stages, 16 microbatches", GPT, 0.95),
    Case("emulated, 4 stages of 6 layers, 8 microbatches", EMULATED, 0.97),
)
QUICK = Case(
    "emulated, quick", EmulatedWorkload(2, forward_seconds=0.012, backward_seconds=0.024, layers_per_stage=6), 1
)


@dataclass(frozen=True)
class Measured:
    """Seconds: the median step, and R of all ranks in its last."""

    balance: tuple[int, ...]
    step_seconds: float
    hidden_seconds: float
    exposed_seconds: float


def run(options: Options) -> Result:
    preload()
    result = Result("balance", CLAIM, settings={"rounds": options.rounds, "quick": options.quick})
    for case in (QUICK,) if options.quick else CASES:
        rounds: dict[str, list[Measured]] = {EQUAL: [], COUNTED: []}
        for _, (way, found) in itertools.product(range(options.rounds), rounds.items()):
            counted = way == COUNTED
            found.append(run_ranks(case.workload.num_stages, measure, case.workload, counted, timeout_seconds=300.0)[0])
        shares = [one.step_seconds / other.step_seconds for one, other in zip(rounds[COUNTED], rounds[EQUAL])]
        result.tables.append(_table(case.name, rounds))
        result.targets.append(Target(f"{case.name}: R counted / equal", statistics.median(shares), case.most))
        result.data[case.name] = {way: [vars(one) for one in found] for way, found in rounds.items()}
    return result


def measure(workload: Workload, counted: bool) -> Measured | None:
    """On one rank; what rank 0 gives is of all. A step is from the first F, R or B of any rank to the last."""
    torch.set_num_threads(1)
    with Pipeline(
        workload.layers(),
        workload.loss,
        num_microbatches=workload.num_microbatches,
        balance="auto" if counted else workload.balance(),
        recompute=RecomputePolicy(verify=OFF),  # an emulated layer saves memory that nobody has written
        timeout_seconds=60.0,
    ) as pipeline:
        inputs, targets = workload.batch()
        seconds, report = [], None
        for _ in range(6):
            dist.barrier()
            pipeline.step(inputs, targets)
            if (report := pipeline.gather_report()) is not None:
                seconds.append(report.step_seconds)
        balance = pipeline.plan.balance
    if report is None:
        return None
    hidden = sum(rank.recompute_hidden_seconds for rank in report.breakdown)
    exposed = sum(rank.recompute_exposed_seconds for rank in report.breakdown)
    return Measured(balance, statistics.median(seconds[1:]), hidden, exposed)  # the first step describes its messages


def _table(title: str, rounds: dict[str, list[Measured]]) -> Table:
    rows = []
    for way, found in rounds.items():
        steps = [one.step_seconds for one in found]
        hidden = statistics.median(one.hidden_seconds for one in found)
        exposed = statistics.median(one.exposed_seconds for one in found)
        layers = ", ".join(map(str, found[0].balance))
        times = (f"{seconds:.3f}" for seconds in (statistics.median(steps), min(steps), max(steps), hidden, exposed))
        rows.append((way, layers, *times))
    headers = ("", "layers", "step s", "fastest round", "slowest", "R hidden s", "R exposed s")
    return Table(f"{title}; medians of rounds in turns, R summed over ranks", headers, tuple(rows))
