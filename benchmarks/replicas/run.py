"""Replicas of a pipeline of emulated stages: how much longer a step is for adding up the gradients, ours beside torch's."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import GIVES_GRADIENTS
from pipetrain.schedule.op import Lane
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

from ..awake import awake
from ..emulated import EmulatedWorkload, hurried
from ..ranks import preload, run_ranks, touch_memory
from ..result import Options, Result, Table, Target
from ..stolen import Stolen
from ..systems import Ours, TorchPipelining
from ..trial import WARM_UP
from .sums import Links, OursWithSums, Sums, TorchWithSums, own_group, seconds_of

CLAIM = "gradients of replicas are added up while other stages still compute: what a step waits for is what no order could hide"
NUM_REPLICAS, SEGMENTS = 4, 8
TURNS, MOST_TURNS = 3, 6  # of each start of the processes: as many undisturbed ones, if so many are enough for that
MOST_STOLEN = 0.05  # of the machine's time in a step, for others of its host: more disturbs
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


def whole(family: str, mode: Mode = Mode.OVERLAP) -> Ours:
    """A bucket for each stage."""
    return Ours(family, mode, label=f"pipetrain {family} {mode}, a bucket per stage")


def in_parts(family: str, mode: Mode = Mode.OVERLAP) -> Ours:
    """A bucket for each part; as many of them on a rank, whatever its number of stages."""
    per_stage = SEGMENTS // whole(family).stages_per_rank
    return Ours(family, mode, segments=per_stage, label=f"pipetrain {family} {mode}, a bucket per part")


def stages_alone(system: Ours) -> bool:
    """Whether the sums of one stage are also timed without those of the others: where a rank has one bucket, and something is recomputed."""
    return system.segments == 1 and system.stages_per_rank == 1 and system.recomputes


_ALL = -1  # in the place of the rank whose sums alone take time
_Taken = tuple[
    tuple[float, float, float], ...
]  # on one rank, of each step of a turn: begin, end, and what the host took


def torch_of(system: Ours) -> TorchPipelining:
    """What it is measured beside: a checkpoint around each stage where ours recompute."""
    return TorchPipelining(system.family, system.recomputes)


@dataclass(frozen=True)
class Turn:
    """Seconds of steps that were taken one right after the other; and what the host took of the machine in each, as a part of its time."""

    seconds: tuple[float, ...]
    stolen: tuple[float, ...] = (0.0, 0.0, 0.0)


@dataclass
class Steps:
    """Of one system, turn by turn: a step without adding up (replicas side by side that know nothing of each other), one with it, and one of
    torch's schedule with an all-reduce after it."""

    system: Ours
    turns: list[Turn] = field(default_factory=list)
    of_stage: list[list[Turn]] = field(default_factory=list)  # without; and where the sums of one rank alone take time
    rests: list[tuple[float, ...]] = field(
        default_factory=list
    )  # per rank, from its last backward to the end of the step alone

    @property
    def exposed(self) -> float:
        """Seconds: what a step with sums takes more than the one before it, without."""
        return _more(self.turns)

    @property
    def of_peer(self) -> float:
        """Of torch's step, with an all-reduce behind it, right after it."""
        return statistics.median(ours / theirs for ours, theirs in calm(self.turns, 1, 2))

    def exposed_of(self, rank: int) -> float:
        return _more(self.of_stage[rank])

    def rest_of(self, rank: int) -> float:
        return statistics.median(rests[rank] for rests in self.rests)

    def seconds(self, place: int) -> list[float]:
        return [seconds for (seconds,) in calm(self.turns, place)]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.system.name, **asdict(self)}


def calm(turns: Sequence[Turn], *places: int) -> list[tuple[float, ...]]:
    """The seconds of these steps of each turn in which the machine was the benchmark's; of all turns, where it never was."""
    of_all = [tuple(turn.seconds[place] for place in places) for turn in turns]
    return [one for one, turn in zip(of_all, turns) if _is_calm(turn.stolen, places)] or of_all


def _is_calm(stolen: Sequence[float], places: Sequence[int] = ()) -> bool:
    return all(stolen[place] <= MOST_STOLEN for place in places or range(len(stolen)))


def _more(turns: Sequence[Turn]) -> float:
    return statistics.median(more - less for less, more in calm(turns, 0, 1))


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    workload, families, turns = (QUICK, FAMILIES[1:2], 1) if options.quick else (WORKLOAD, FAMILIES, TURNS)
    ways = itertools.product(families, (Mode.OVERLAP, Mode.NEVER), (whole, in_parts))
    rows = [Steps(make(family, mode), of_stage=[[] for _ in range(workload.num_stages)]) for family, mode, make in ways]
    for number in range(options.rounds):
        for row in rows:
            with awake():
                _add_turns(row, workload, turns)
            last, kept = row.turns[-1].seconds, len([turn for turn in row.turns if _is_calm(turn.stolen)])
            line = f"{row.system.name:46} {last[1]:8.3f} s, torch {last[2]:.3f} s, {kept} of {len(row.turns)} turns undisturbed"
            print(f"round {number + 1}/{options.rounds}  {line}", file=sys.stderr, flush=True)
    settings = {"rounds": options.rounds, "turns": turns, "replicas": NUM_REPLICAS, "workload": vars(workload)}
    result = Result("replicas", CLAIM, settings=settings)
    result.tables.append(_table(rows, workload))
    result.targets += _targets(rows, workload)
    stolen = [share for row in rows for turns in (row.turns, *row.of_stage) for turn in turns for share in turn.stolen]
    disturbed = [share for share in stolen if share > MOST_STOLEN]
    result.notes += [
        NOTE,
        f"{len(disturbed)} of {len(stolen)} steps do not count: the host had taken more than {MOST_STOLEN:.0%} of this machine's time in them",
    ]
    result.data = {"rows": [row.to_json() for row in rows]}
    return result


def _add_turns(row: Steps, workload: EmulatedWorkload, turns: int) -> None:
    """Starts all ranks of all replicas, and adds what they measured in so many undisturbed turns, if they came to that."""
    num_ranks = workload.num_stages * NUM_REPLICAS
    ranks = run_ranks(num_ranks, run_trial, row.system, workload, turns, timeout_seconds=900.0)
    row.turns += _together([of_rank["turns"][_ALL] for of_rank in ranks])
    for rank, of_rank in enumerate(row.of_stage if stages_alone(row.system) else ()):
        of_rank += _together([one["turns"][rank] for one in ranks])
    replicas = [of_rank["rests"] for of_rank in ranks if of_rank["rests"]]
    row.rests += [tuple(map(statistics.median, zip(*of_turn))) for of_turn in zip(*replicas, strict=True)]


def _together(of_ranks: Sequence[Sequence[_Taken]]) -> list[Turn]:
    """Each turn's steps from the first rank's start to the last one's end."""
    turns = []
    for of_turn in zip(*of_ranks, strict=True):
        steps = [tuple(zip(*ranks, strict=True)) for ranks in zip(*of_turn, strict=True)]
        seconds = tuple(max(ends) - min(begins) for begins, ends, _ in steps)
        turns.append(Turn(seconds, tuple(max(stolen) for _, _, stolen in steps)))
    return turns


def run_trial(system: Ours, workload: EmulatedWorkload, turns: int) -> dict[str, Any]:
    """On one rank: each kind of step to warm up, its sleeps hurried, then all of them in turns, in time."""
    touch_memory(workload.memory_bytes())
    size = workload.num_stages
    replica = own_group([[r * size + stage for stage in range(size)] for r in range(NUM_REPLICAS)])
    replicas = own_group([[r * size + stage for r in range(NUM_REPLICAS)] for stage in range(size)])
    ours = OursWithSums(system, workload, NUM_REPLICAS, replica, Links())
    torch = TorchWithSums(torch_of(system), workload, workload.backward_seconds, replica, replicas)
    calls = _calls(system, ours, torch, workload)
    with hurried(WARM_UP):
        for call in itertools.chain(*calls.values()):
            call()
    gc.collect()
    gc.freeze()
    taken: dict[int, list[_Taken]] = {key: [] for key in calls}
    rests: list[tuple[float, ...]] = []
    for number in range(MOST_TURNS if turns > 1 else 1):
        if number >= turns and not _again(taken.values(), turns):
            break
        for key, of_turn in calls.items():
            taken[key].append(_take(of_turn))
        report = ours.alone.pipeline.gather_report()
        if report is not None:
            rests.append(rests_of(report.timeline))
    dist.barrier()
    ours.close()
    return {"turns": taken, "rests": rests}


def _calls(
    system: Ours, runner: OursWithSums, torch: TorchWithSums, workload: EmulatedWorkload
) -> dict[int, tuple[Callable[[], None], ...]]:
    """The steps of each turn: alone, with all sums, torch's; perhaps alone and with the sums of each rank alone."""
    ranks, reduce = range(workload.num_stages), workload.backward_seconds
    alone, all_sums = runner.alone.step, Sums(NUM_REPLICAS, (reduce,) * len(ranks))
    calls: dict[int, tuple[Callable[[], None], ...]] = {_ALL: (alone, partial(runner.step, all_sums), torch.step)}
    for rank in ranks if stages_alone(system) else ():
        own = tuple(reduce if place == rank else 0.0 for place in ranks)
        calls[rank] = (alone, partial(runner.step, Sums(NUM_REPLICAS, own)))
    return calls


def _take(calls: Sequence[Callable[[], None]]) -> _Taken:
    steps, stolen = [], Stolen()
    for call in calls:
        dist.barrier()
        stolen.share()
        begin = time.perf_counter()
        call()
        steps.append((begin, time.perf_counter(), stolen.share()))
    return tuple(steps)


def _again(taken: Iterable[Sequence[_Taken]], turns: int) -> bool:
    """Whether too few were undisturbed. What the first rank saw counts."""
    calm_turns = [sum(_is_calm([stolen for *_, stolen in steps]) for steps in of_key) for of_key in taken]
    answer = [min(calm_turns) < turns]
    dist.broadcast_object_list(answer, 0)
    return answer[0]


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
        alone, summed, of_torch = (statistics.median(row.seconds(place)) for place in range(3))
        line = [row.system.name, f"{alone:.3f}", f"{summed:.3f}"]
        line += [f"{_spread(row.seconds(1)):.1%}", *(f"{seconds / reduce:.1%}" for seconds in exposed)]
        line += [
            f"{row.exposed_of(rank) / reduce:.1%} ({_least(row, rank, reduce) / reduce:.1%})"
            if row.of_stage[rank]
            else ""
            for rank in ranks
        ]
        lines.append((*line, f"{of_torch:.3f}", f"{row.of_peer:.3f}"))
    stages = (f"stage {rank} (least)" for rank in ranks)
    heads = ("", "alone s", "step s", "spread", "exposed", "simulated", *stages, "torch s", "step / torch")
    title = (
        f"{NUM_REPLICAS} replicas of {workload.num_stages} ranks, {workload.num_microbatches} microbatches each, F {workload.forward_seconds:g} s, "
        f"B {workload.backward_seconds:g} s, adding up {reduce:g} s per rank; exposed as a part of that; torch's schedule, recomputing or not as "
        f"ours, has an all-reduce behind it; medians of {min(len(calm(row.turns, 0, 1)) for row in rows)} turns or more"
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
    return system.segments == 1 and system.stages_per_rank == 1 and not system.recomputes
