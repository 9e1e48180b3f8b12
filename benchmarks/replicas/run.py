"""Replicas of a pipeline of emulated stages: how much longer a step is for adding up the gradients, ours beside torch's."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import GIVES_GRADIENTS
from pipetrain.schedule.op import Lane
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

from ..emulated import EmulatedWorkload, hurried
from ..ranks import preload, run_ranks, touch_memory
from ..result import Options, Result, Table, Target
from ..systems import Ours, TorchPipelining
from ..trial import WARM_UP
from .sums import Links, OursWithSums, Sums, TorchWithSums, own_group, seconds_of

CLAIM = "gradients of replicas are added up while other stages still compute: what a step waits for is what no order could hide"
NUM_REPLICAS, SEGMENTS = 4, 8
TURNS = 2  # of each start of the processes
# What may be exposed more than has to be, as a part of the reduce, and of buckets as parts what may be exposed of a blocking one.
MOST_OVER, MOST_OF_BLOCKING = 0.05, 0.20
WORKLOAD = EmulatedWorkload(
    num_stages=2,
    num_microbatches=4,
    forward_seconds=0.4,  # eight processes on two cores: what a step computes takes them a quarter of a second
    backward_seconds=0.8,
    tensor_bytes=100_000,
    layers_per_stage=SEGMENTS,
)
QUICK = replace(WORKLOAD, forward_seconds=0.02, backward_seconds=0.04)
FAMILIES = ("gpipe", "1f1b", "interleaved")
NOTE = (
    "without recomputation in gpipe and 1f1b the one bucket of stage 0 comes after the step in any order, as torch's all-reduce does: those two "
    "rows can be no faster, and with a bucket for each part they are"
)
ALONE, SUMMED, TORCH = "alone", "summed", "torch"


def whole(family: str, mode: Mode = Mode.OVERLAP) -> Ours:
    """A bucket for each stage."""
    return Ours(family, mode, label=f"pipetrain {family} {mode}, a bucket per stage")


def in_parts(family: str, mode: Mode = Mode.OVERLAP) -> Ours:
    """A bucket for each part; as many of them on a rank, whatever its number of stages."""
    per_stage = SEGMENTS // whole(family).stages_per_rank
    return Ours(family, mode, segments=per_stage, label=f"pipetrain {family} {mode}, a bucket per part")


def stages_alone(system: Ours) -> bool:
    """Whether the sums of one stage are also timed without those of the others: where a rank has one bucket."""
    return system.segments == 1 and system.stages_per_rank == 1


@dataclass(frozen=True)
class Match:
    """What takes turns in one start of the processes: our ways of a family, and torch's."""

    family: str
    recomputes: bool

    @property
    def ours(self) -> tuple[Ours, ...]:
        mode = Mode.OVERLAP if self.recomputes else Mode.NEVER
        return whole(self.family, mode), in_parts(self.family, mode)

    @property
    def torch(self) -> TorchPipelining:
        return TorchPipelining(self.family, self.recomputes)


@dataclass
class Steps:
    """Of one system, seconds of the steps of each turn: without adding up (replicas side by side that know nothing of each other), with it,
    and of torch's schedule with an all-reduce after it."""

    system: Ours
    alone: list[float] = field(default_factory=list)
    summed: list[float] = field(default_factory=list)
    of_torch: list[float] = field(default_factory=list)
    of_stage: list[list[float]] = field(default_factory=list)  # where the sums of one rank alone take their time
    rests: list[tuple[float, ...]] = field(
        default_factory=list
    )  # per rank, from its last backward to the end of the step alone

    @property
    def exposed(self) -> float:
        """Seconds: the median over turns of what a step with sums takes more than one of the same turn without."""
        return _more(self.summed, self.alone)

    @property
    def of_peer(self) -> float:
        """Of torch's step with an all-reduce behind it, the median over turns."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.summed, self.of_torch, strict=True))

    def exposed_of(self, rank: int) -> float:
        return _more(self.of_stage[rank], self.alone)

    def rest_of(self, rank: int) -> float:
        return statistics.median(rests[rank] for rests in self.rests)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.system.name, **asdict(self)}


def _more(seconds: Sequence[float], less: Sequence[float]) -> float:
    return statistics.median(one - other for one, other in zip(seconds, less, strict=True))


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    workload, families, turns = (QUICK, FAMILIES[1:2], 1) if options.quick else (WORKLOAD, FAMILIES, TURNS)
    matches = [Match(family, recomputes) for family in families for recomputes in (True, False)]
    rows = {
        match: [Steps(ours, of_stage=[[] for _ in range(workload.num_stages)]) for ours in match.ours]
        for match in matches
    }
    for number in range(options.rounds):
        for match in matches:
            _add_turns(rows[match], match, workload, turns)
            for row in rows[match]:
                line = f"{row.system.name:46} {row.summed[-1]:8.3f} s, torch {row.of_torch[-1]:.3f} s"
                print(f"round {number + 1}/{options.rounds}  {line}", file=sys.stderr, flush=True)
    all_rows = [row for of_match in rows.values() for row in of_match]
    settings = {"rounds": options.rounds, "turns": turns, "replicas": NUM_REPLICAS, "workload": vars(workload)}
    result = Result("replicas", CLAIM, settings=settings)
    result.tables.append(_table(all_rows, workload))
    result.targets += _targets(all_rows, workload)
    result.notes.append(NOTE)
    result.data = {"rows": [row.to_json() for row in all_rows]}
    return result


def _add_turns(rows: Sequence[Steps], match: Match, workload: EmulatedWorkload, turns: int) -> None:
    """Starts all ranks of all replicas, and adds what they measured in so many turns."""
    num_ranks = workload.num_stages * NUM_REPLICAS
    ranks = run_ranks(num_ranks, run_trial, match, workload, turns, timeout_seconds=600.0)
    seconds = {what: _steps([of_rank["spans"][what] for of_rank in ranks]) for what in ranks[0]["spans"]}
    for row in rows:
        name = row.system.name
        row.alone += seconds[name, ALONE]
        row.summed += seconds[name, SUMMED]
        row.of_torch += seconds[match.torch.name, TORCH]
        for rank, of_rank in enumerate(row.of_stage):
            of_rank += seconds.get((name, rank), [])
        replicas = [of_rank["rests"][name] for of_rank in ranks if of_rank["rests"][name]]
        row.rests += [tuple(map(statistics.median, zip(*of_turn))) for of_turn in zip(*replicas, strict=True)]


def _steps(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each step, from the first rank's start to the last one's end."""
    return [max(end for _, end in ranks) - min(begin for begin, _ in ranks) for ranks in zip(*spans, strict=True)]


def run_trial(match: Match, workload: EmulatedWorkload, turns: int) -> dict[str, Any]:
    """On one rank: each system's steps to warm up, its sleeps hurried, then all of them in turns, in time."""
    touch_memory(workload.memory_bytes())
    size = workload.num_stages
    replica = own_group([[r * size + stage for stage in range(size)] for r in range(NUM_REPLICAS)])
    replicas = own_group([[r * size + stage for r in range(NUM_REPLICAS)] for stage in range(size)])
    links = Links()
    ours = [OursWithSums(system, workload, NUM_REPLICAS, replica, links) for system in match.ours]
    reduce = workload.backward_seconds
    torch = TorchWithSums(match.torch, workload, reduce, replica, replicas)
    calls = {(match.torch.name, TORCH): torch.step}
    for system, runner in zip(match.ours, ours):
        calls.update({(system.name, what): call for what, call in _calls(system, runner, workload)})
    with hurried(WARM_UP):
        for call in calls.values():
            call()
    gc.collect()
    gc.freeze()
    spans: dict[tuple[str, Any], list[tuple[float, float]]] = {what: [] for what in calls}
    rests: dict[str, list[tuple[float, ...]]] = {system.name: [] for system in match.ours}
    for _ in range(turns):
        for what, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            spans[what].append((begin, time.perf_counter()))
        for system, runner in zip(match.ours, ours):
            report = runner.alone.pipeline.gather_report()
            if report is not None:
                rests[system.name].append(rests_of(report.timeline))
    dist.barrier()
    for runner in ours:
        runner.close()
    return {"spans": spans, "rests": rests}


def _calls(
    system: Ours, runner: OursWithSums, workload: EmulatedWorkload
) -> Iterator[tuple[str | int, Callable[[], None]]]:
    """The steps of a system: alone, with all sums, and perhaps with those of each rank alone."""
    ranks, reduce = range(workload.num_stages), workload.backward_seconds
    yield ALONE, runner.alone.step
    yield SUMMED, partial(runner.step, Sums(NUM_REPLICAS, (reduce,) * len(ranks)))
    for rank in ranks if stages_alone(system) else ():
        seconds = tuple(reduce if place == rank else 0.0 for place in ranks)
        yield rank, partial(runner.step, Sums(NUM_REPLICAS, seconds))


def rests_of(timeline: Timeline) -> tuple[float, ...]:
    """Per rank, seconds from the end of its last backward to the last end of any op that computes."""
    computed = [event for event in timeline.events if event.op.kind.computes]
    end = max(event.end for event in computed)
    return tuple(
        end - max(event.end for event in computed if event.rank == rank and event.op.kind in GIVES_GRADIENTS)
        for rank in range(timeline.num_ranks)
    )


def simulated_exposed(system: Ours, workload: EmulatedWorkload) -> float:
    """Seconds that a step takes more for its sums, in the schedules that run, on costs alone."""
    sums = Sums(NUM_REPLICAS, (workload.backward_seconds,) * workload.num_stages)
    alone, schedule = system.schedule(workload), system.schedule(workload, NUM_REPLICAS)
    costs = workload.costs(stages_per_rank=system.stages_per_rank)
    of_stages = [
        [op for op in schedule.lane(rank, Lane.REDUCE) if op.stage == stage]
        for stage, rank in enumerate(schedule.stage_ranks)
    ]
    reduce = tuple(sum(seconds_of(op, schedule, sums) for op in ops) for ops in of_stages)
    with_sums = simulate(schedule, replace(costs, reduce=reduce)).step_seconds
    return with_sums - simulate(alone, costs).step_seconds


def _table(rows: Sequence[Steps], workload: EmulatedWorkload) -> Table:
    reduce, ranks = workload.backward_seconds, range(workload.num_stages)
    lines = []
    for row in rows:
        exposed = (row.exposed, simulated_exposed(row.system, workload))
        line = [row.system.name, f"{statistics.median(row.alone):.3f}", f"{statistics.median(row.summed):.3f}"]
        line += [f"{_spread(row.summed):.1%}", *(f"{seconds / reduce:.1%}" for seconds in exposed)]
        line += [
            f"{row.exposed_of(rank) / reduce:.1%} ({_least(row, rank, reduce) / reduce:.1%})"
            if row.of_stage[rank]
            else ""
            for rank in ranks
        ]
        lines.append((*line, f"{statistics.median(row.of_torch):.3f}", f"{row.of_peer:.3f}"))
    stages = (f"stage {rank} (least)" for rank in ranks)
    heads = ("", "alone s", "step s", "spread", "exposed", "simulated", *stages, "torch s", "step / torch")
    title = (
        f"{NUM_REPLICAS} replicas of {workload.num_stages} ranks, {workload.num_microbatches} microbatches each, F {workload.forward_seconds:g} s, "
        f"B {workload.backward_seconds:g} s, adding up {reduce:g} s per rank; exposed as a part of that; torch's schedule, recomputing or not as "
        f"ours, has an all-reduce behind it; medians of {len(rows[0].summed)} turns"
    )
    return Table(title, heads, tuple(lines))


def _spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def _least(row: Steps, rank: int, reduce: float) -> float:
    """What of adding up a whole rank's gradients no order could hide: nothing runs beside it after the end of the step."""
    return max(0.0, reduce - row.rest_of(rank))


def _targets(rows: Sequence[Steps], workload: EmulatedWorkload) -> list[Target]:
    reduce = workload.backward_seconds
    targets = []
    for row in rows:
        name, system = row.system.name, row.system
        if stages_alone(system):
            for rank in range(workload.num_stages):
                over = row.exposed_of(rank) - _least(row, rank, reduce)
                what = f"{name}: exposed of stage {rank} over the least, as a part of the reduce"
                targets.append(Target(what, over / reduce, MOST_OVER))
        elif system.segments == 1:
            over = row.exposed - simulated_exposed(system, workload)
            what = f"{name}: exposed over what is simulated, as a part of the reduce"
            targets.append(Target(what, over / reduce, MOST_OVER))
        else:
            what = f"{name}: exposed, as a part of a blocking reduce"
            targets.append(Target(what, row.exposed / reduce, MOST_OF_BLOCKING))
        if not _is_equal_by_design(system):
            what = f"{name} / torch {system.family}{'' if system.recomputes else ' without recomputation'}, then an all-reduce"
            targets.append(Target(what, row.of_peer, 1.0))
    return targets


def _is_equal_by_design(system: Ours) -> bool:
    """Where the last backward of a rank ends the step, and its one bucket comes after it as an all-reduce after the step does."""
    return stages_alone(system) and not system.recomputes
