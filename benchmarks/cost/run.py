"""The runtime's own cost: stages that do nothing, so that what is left is ours; and how planning grows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetrain.runtime.program import Program
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane
from pipetrain.schedule.simulate import simulate

from ..charts import draw_points
from ..emulated import EmulatedWorkload
from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target
from ..systems import Ours

CLAIM = "an F, R or B costs the runtime half a millisecond at most, transfers included"
MOST_SECONDS_PER_OP = 0.5e-3
# Of planning, at the largest size, per op of all ranks: 2 s to simulate 64 stages x 512 microbatches, 8 s to check them.
MOST_PLANNING_SECONDS_PER_OP = {"simulate": 8.8e-6, "check": 35e-6}
SIZES = ((2, 8), (4, 16), (8, 64), (16, 128), (32, 256), (64, 512))


class Nothing(nn.Module):
    """The least that has a parameter, saves something for its B, and so needs an R: one multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor) -> Tensor:
        return given * self.weight


@dataclass(frozen=True)
class EmptyWorkload(EmulatedWorkload):
    """Stages that do nothing."""

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [Nothing] * self.num_stages


@dataclass(frozen=True)
class StepCost:
    """Rank 0's steps: seconds per step, its F, R and B in a step, and the seconds of a step in which none of them ran."""

    step_seconds: tuple[float, ...]
    num_ops: int
    busy_seconds: float
    send_seconds: float

    @property
    def seconds_per_op(self) -> float:
        return statistics.median(self.step_seconds) / self.num_ops


def run(options: Options) -> Result:
    result = Result("cost", CLAIM, settings={"rounds": options.rounds, "num_microbatches": 64, "tensor_bytes": 4})
    preload()
    costs = [measure_step_cost(steps=5 if options.quick else 20) for _ in range(options.rounds)]
    best = min(costs, key=lambda cost: cost.seconds_per_op)
    result.tables.append(_table_of_steps(costs))
    result.targets.append(
        Target("milliseconds per F, R or B, best round", best.seconds_per_op * 1e3, MOST_SECONDS_PER_OP * 1e3)
    )
    growth = [measure_growth(*size) for size in (SIZES[:3] if options.quick else SIZES)]
    result.tables.append(_table_of_growth(growth))
    for part, most in MOST_PLANNING_SECONDS_PER_OP.items():
        taken = growth[-1][part] / growth[-1]["ops"]
        result.targets.append(Target(f"microseconds per op to {part} the largest size", taken * 1e6, most * 1e6))
    result.data = {"steps": [vars(cost) for cost in costs], "growth": growth}
    result.draw = lambda path: draw_points(
        path,
        "Planning a step: schedule, check, simulation, one rank's program",
        "ops of all ranks (messages included)",
        "seconds",
        {key: [(row["ops"], row[key]) for row in growth] for key in ("make", "check", "simulate", "program")},
        log=True,
    )
    return result


def measure_step_cost(*, steps: int) -> StepCost:
    """Two stages that do nothing, 64 microbatches of 4 bytes, overlap, one thread."""
    workload = EmptyWorkload(2, num_microbatches=64, tensor_bytes=4)
    first: StepCost = run_ranks(2, _run_steps, workload, steps)[0]
    return first


def _run_steps(workload: EmulatedWorkload, steps: int) -> StepCost:
    runner = Ours().start(workload)
    for _ in range(3):
        runner.step()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        runner.step()
        seconds.append(time.perf_counter() - start)
    events = runner.pipeline.report.events
    computed = [event for event in events if event.op.kind.computes]
    sent = [event for event in events if event.lane is Lane.SEND]
    runner.close()
    return StepCost(
        tuple(seconds),
        len(computed),
        sum(event.end - event.start for event in computed),
        sum(event.end - event.start for event in sent),
    )


def measure_growth(num_stages: int, num_microbatches: int) -> dict[str, Any]:
    """Seconds of each part of planning for one size; `program` is one rank's, the middle one's."""
    row: dict[str, Any] = {"stages": num_stages, "microbatches": num_microbatches}
    row["make"], schedule = _timed(make_schedule, "gpipe", num_stages=num_stages, num_microbatches=num_microbatches)
    row["check"], _ = _timed(check, schedule)
    row["simulate"], _ = _timed(simulate, schedule, Costs.spread(num_stages))
    row["program"], _ = _timed(Program.of, schedule, num_stages // 2)
    row["ops"] = sum(len(ops) for rank in schedule.lanes for ops in rank.values())
    return row


def _timed(function: Any, *args: Any, **named: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    value = function(*args, **named)
    return time.perf_counter() - start, value


def _table_of_steps(costs: list[StepCost]) -> Table:
    rows = []
    for number, cost in enumerate(costs):
        step = statistics.median(cost.step_seconds)
        rows.append(
            (
                f"round {number + 1}",
                f"{step * 1e3:.2f}",
                str(cost.num_ops),
                f"{cost.seconds_per_op * 1e3:.3f}",
                f"{cost.busy_seconds / step:.0%}",
                f"{1 - cost.busy_seconds / step:.0%}",
            )
        )
    title = f"2 empty stages, 64 microbatches of 4 bytes, gpipe overlap, rank 0; median of {len(costs[0].step_seconds)} steps"
    headers = ("", "step ms", "F, R, B", "ms per op", "in F, R, B", "transfers and waits")
    return Table(title, headers, tuple(rows))


def _table_of_growth(growth: list[dict[str, Any]]) -> Table:
    parts = ("make", "check", "simulate", "program")
    rows = tuple(
        (f"{row['stages']} x {row['microbatches']}", str(row["ops"]), *(f"{row[part]:.4f}" for part in parts))
        for row in growth
    )
    title = "seconds to plan a step, stages x microbatches (once per run, on every rank)"
    return Table(title, ("", "ops", *parts), rows)
