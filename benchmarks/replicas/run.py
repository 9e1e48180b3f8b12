"""Replicas of a pipeline of emulated stages: how much longer a step is for adding up the gradients, ours beside torch's."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import GIVES_GRADIENTS
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.reduce import with_reduces
from pipetrain.schedule.simulate import simulate

from ..emulated import EmulatedWorkload, hurried
from ..ranks import preload, run_ranks, touch_memory
from ..result import Options, Result, Table, Target
from ..systems import Ours, OursRunner, TorchPipelining
from ..trial import WARM_UP
from .sums import Sums, start

CLAIM = "gradients of replicas are added up while other stages still compute: what a step waits for is what no order could hide"
NUM_REPLICAS, SEGMENTS = 4, 8
# What may be exposed more than has to be, as a part of the reduce, and of buckets as parts what may be exposed of a blocking one.
MOST_OVER, MOST_OF_BLOCKING = 0.05, 0.20
WORKLOAD = EmulatedWorkload(
    num_stages=2,
    num_microbatches=4,
    forward_seconds=0.1,
    backward_seconds=0.2,
    tensor_bytes=100_000,
    layers_per_stage=SEGMENTS,
)
QUICK = replace(WORKLOAD, forward_seconds=0.02, backward_seconds=0.04)
FAMILIES = ("gpipe", "1f1b", "interleaved")

# Where the last backward of a rank ends the step, its one bucket comes after it in any order: as an all-reduce after the step does.
AS_FAST = 1.02
NOTE = (
    "without recomputation a stage is one bucket, and in gpipe and 1f1b that of stage 0 comes after the step in any order, as torch's all-reduce "
    "does: those two rows are equal but for noise"
)

System = Ours | TorchPipelining


def whole(family: str) -> Ours:
    """A bucket for each stage."""
    return Ours(family, Mode.OVERLAP, label=f"pipetrain {family} overlap, a bucket per stage")


def without_recompute(family: str) -> Ours:
    """The same; nothing is recomputed, so a stage has no parts."""
    return Ours(family, Mode.NEVER, label=f"pipetrain {family} never, a bucket per stage")


def in_parts(family: str) -> Ours:
    """A bucket for each part; as many of them on a rank, whatever its number of stages."""
    per_stage = SEGMENTS // whole(family).stages_per_rank
    return Ours(
        family, Mode.OVERLAP, sets=None, segments=per_stage, label=f"pipetrain {family} overlap, a bucket per part"
    )


def stages_alone(system: Ours) -> bool:
    """Whether the sums of one stage are also timed without those of the others: where a rank has one bucket, and something is recomputed."""
    return system.segments == 1 and system.recomputes and system.stages_per_rank == 1


def _is_equal_by_design(system: Ours) -> bool:
    return not system.recomputes and system.stages_per_rank == 1


@dataclass
class Steps:
    """Of one system: the steps of each round without adding up (replicas side by side that know nothing of each other) and with it."""

    system: System
    alone: list[float] = field(default_factory=list)
    summed: list[float] = field(default_factory=list)
    of_stage: list[list[float]] = field(default_factory=list)  # where the sums of one rank alone take their time
    rests: list[tuple[float, ...]] = field(
        default_factory=list
    )  # per rank, from its last backward to the end of the step alone

    @property
    def summed_seconds(self) -> float:
        return statistics.median(self.summed)

    @property
    def exposed(self) -> float:
        """Seconds: the median over rounds of what a step with sums takes more than one of the same round without."""
        return _more(self.summed, self.alone)

    def exposed_of(self, rank: int) -> float:
        return _more(self.of_stage[rank], self.alone)

    def rest_of(self, rank: int) -> float:
        return statistics.median(rests[rank] for rests in self.rests)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.system.name, **asdict(self)}


def _more(seconds: Sequence[float], less: Sequence[float]) -> float:
    return statistics.median(one - other for one, other in zip(seconds, less))


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    workload, families = (QUICK, FAMILIES[1:2]) if options.quick else (WORKLOAD, FAMILIES)
    reduce = workload.backward_seconds
    all_ranks = (reduce,) * workload.num_stages
    systems: list[System] = [make(family) for family in families for make in (whole, in_parts, without_recompute)]
    systems += [TorchPipelining(family, recomputes) for family in families for recomputes in (False, True)]
    rows = [Steps(system, of_stage=[[] for _ in all_ranks]) for system in systems]
    for number in range(options.rounds):
        for row in rows:
            _round(row, workload, all_ranks, number, options)
    result = Result(
        "replicas", CLAIM, settings={"rounds": options.rounds, "replicas": NUM_REPLICAS, "workload": vars(workload)}
    )
    result.tables.append(_table(rows, workload))
    result.targets += _targets(rows, workload)
    result.notes.append(NOTE)
    result.data = {"rows": [row.to_json() for row in rows]}
    return result


def _round(row: Steps, workload: EmulatedWorkload, reduce: tuple[float, ...], number: int, options: Options) -> None:
    steps = 1 if options.quick else 3
    if isinstance(row.system, Ours):
        seconds, rests = _alone(row.system, workload, steps)
        row.alone.append(seconds)
        row.rests.append(rests)
        if stages_alone(row.system):
            for rank, of_rank in enumerate(row.of_stage):
                own = tuple(seconds if place == rank else 0.0 for place, seconds in enumerate(reduce))
                of_rank.append(_with_sums(row.system, workload, own, steps))
    row.summed.append(_with_sums(row.system, workload, reduce, steps))
    print(
        f"round {number + 1}/{options.rounds}  {row.system.name:36} {row.summed[-1]:8.3f} s",
        file=sys.stderr,
        flush=True,
    )


def _with_sums(system: System, workload: EmulatedWorkload, reduce: tuple[float, ...], steps: int) -> float:
    """Seconds of a step of all replicas, from the first rank's start to the last one's end."""
    sums = Sums(NUM_REPLICAS, reduce)
    values = run_ranks(workload.num_stages * NUM_REPLICAS, run_trial, system, workload, sums, steps)
    return statistics.median(_steps([value["spans"] for value in values]))


def _alone(system: System, workload: EmulatedWorkload, steps: int) -> tuple[float, tuple[float, ...]]:
    """The same of as many pipelines side by side, until the last has ended; and of each rank the time from its last backward to the end of
    the step."""
    size = workload.num_stages
    values = run_ranks(size * NUM_REPLICAS, run_trial, system, workload, Sums(1), steps, num_worlds=NUM_REPLICAS)
    worlds = [values[first : first + size] for first in range(0, len(values), size)]
    of_worlds = zip(*(_steps([value["spans"] for value in world]) for world in worlds))
    rests = [world[0]["rests"] for world in worlds]
    return statistics.median(map(max, of_worlds)), tuple(statistics.median(of_rank) for of_rank in zip(*rests))


def _steps(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each step, from the first rank's start to the last one's end."""
    return [max(end for _, end in ranks) - min(begin for begin, _ in ranks) for ranks in zip(*spans)]


def run_trial(system: System, workload: EmulatedWorkload, sums: Sums, steps: int) -> dict[str, Any]:
    """On one rank: a step to warm up, its sleeps hurried, then steps in time."""
    touch_memory(workload.memory_bytes())
    runner = start(system, workload, sums)
    with hurried(WARM_UP):
        runner.step()
    gc.collect()
    gc.freeze()
    spans = []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        runner.step()
        spans.append((begin, time.perf_counter()))
    report = runner.pipeline.gather_report() if isinstance(runner, OursRunner) else None
    rests = None if report is None else rests_of(report.timeline)
    dist.barrier()
    runner.close()
    return {"spans": spans, "rests": rests}


def rests_of(timeline: Timeline) -> tuple[float, ...]:
    """Per rank, seconds from the end of its last backward to the last end of any op that computes."""
    computed = [event for event in timeline.events if event.op.kind.computes]
    end = max(event.end for event in computed)
    return tuple(
        end - max(event.end for event in computed if event.rank == rank and event.op.kind in GIVES_GRADIENTS)
        for rank in range(timeline.num_ranks)
    )


def simulated_exposed(system: Ours, workload: EmulatedWorkload) -> float:
    """Seconds that a step takes more for its sums, in the schedule that runs, on costs alone."""
    sums = Sums(NUM_REPLICAS, (workload.backward_seconds,) * workload.num_stages)
    alone = system.schedule(workload)
    schedule = with_reduces(alone, num_replicas=NUM_REPLICAS)
    costs = workload.costs(stages_per_rank=system.stages_per_rank)
    reduce = tuple(sums.seconds[rank] / alone.stage_ranks.count(rank) for rank in alone.stage_ranks)
    with_sums = simulate(schedule, replace(costs, reduce=reduce)).step_seconds
    return with_sums - simulate(alone, costs).step_seconds


def _table(rows: Sequence[Steps], workload: EmulatedWorkload) -> Table:
    reduce, ranks = workload.backward_seconds, range(workload.num_stages)
    lines = []
    for row in rows:
        line = [row.system.name, f"{row.summed_seconds:.3f}", f"{_spread(row.summed):.1%}"]
        if isinstance(row.system, Ours):
            exposed = (row.exposed, simulated_exposed(row.system, workload))
            line += [f"{statistics.median(row.alone):.3f}", *(f"{seconds / reduce:.1%}" for seconds in exposed)]
            line += [
                f"{row.exposed_of(rank) / reduce:.1%} ({_least(row, rank, reduce) / reduce:.1%})"
                for rank in ranks
                if row.of_stage[rank]
            ]
        lines.append(line)
    heads = ["", "step s", "spread", "alone s", "exposed", "simulated", *(f"stage {rank} (least)" for rank in ranks)]
    title = (
        f"{NUM_REPLICAS} replicas of {workload.num_stages} ranks, {workload.num_microbatches} microbatches each, F {workload.forward_seconds:g} s, "
        f"B {workload.backward_seconds:g} s, adding up {reduce:g} s per rank; exposed as a part of that; median of {len(rows[0].summed)} rounds"
    )
    return Table(title, tuple(heads), tuple((*line, *[""] * (len(heads) - len(line))) for line in lines))


def _spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def _least(row: Steps, rank: int, reduce: float) -> float:
    """What of adding up a whole rank's gradients no order could hide: nothing runs beside it after the end of the step."""
    return max(0.0, reduce - row.rest_of(rank))


def _targets(rows: Sequence[Steps], workload: EmulatedWorkload) -> list[Target]:
    reduce = workload.backward_seconds
    targets = []
    for row in rows:
        if not isinstance(row.system, Ours):
            continue
        name = row.system.name
        if stages_alone(row.system):
            for rank in range(workload.num_stages):
                over = row.exposed_of(rank) - _least(row, rank, reduce)
                what = f"{name}: exposed of stage {rank} over the least, as a part of the reduce"
                targets.append(Target(what, over / reduce, MOST_OVER))
        elif row.system.recomputes:
            if row.system.segments == 1:
                over = row.exposed - simulated_exposed(row.system, workload)
                what = f"{name}: exposed over what is simulated, as a part of the reduce"
                targets.append(Target(what, over / reduce, MOST_OVER))
            else:
                what = f"{name}: exposed, as a part of a blocking reduce"
                targets.append(Target(what, row.exposed / reduce, MOST_OF_BLOCKING))
        for peer in rows:
            if isinstance(peer.system, TorchPipelining) and _alike(peer.system, row.system):
                what = f"{name} / {peer.system.name}, then an all-reduce"
                most = AS_FAST if _is_equal_by_design(row.system) else 1.0
                targets.append(Target(what, row.summed_seconds / peer.summed_seconds, most))
    return targets


def _alike(peer: TorchPipelining, ours: Ours) -> bool:
    return (peer.family, peer.recomputes) == (ours.family, ours.recomputes)
