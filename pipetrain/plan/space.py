"""What `pipetrain plan` may choose, where it starts, and which choices are neighbours of one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipetrain.plan.balance import balance_by_work, balance_evenly, cut_by_work, moved
from pipetrain.plan.footprint import Holdings
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import Profile
from pipetrain.plan.stage_costs import bytes_of_layers, seconds_of_layers
from pipetrain.schedule.families import ALWAYS_SPLIT, AUTO
from pipetrain.schedule.placement import stage_ranks_of
from pipetrain.schedule.policy import LAYERS, LastStage, Mode, Offload, Outputs, RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Prefers

# With one stage per rank, and with several.
_ONE_PER_RANK = (AUTO, "1f1b", "gpipe", "zb-h1")
_MORE_PER_RANK = (("interleaved", 8), ("interleaved", 4), ("interleaved", 2), ("zbv", 2))
_SHAPES = (1.0, 2.0, math.inf)  # microbatches in flight per later stage: as 1F1B, twice that, as GPipe
_SEGMENTS = (1, 2, LAYERS)
_F_AND_B = ("forward", "backward")
_WORDS = ("attention", "matmul")
_ALL_BALANCES, _ALL_OF_FAMILIES = 64, 24  # up to so many balances, all are starts: of `auto`, of named families
_MOST_MICROBATCHES = 256
_MANY_LAYOUTS = 24
_MOST_ALONE = 8  # stages
_FEW_STAGES = 4
_FEW_SETS = (1, 2, 3, 4)  # of a stage whose other sets go to host memory
# Keys that plan sets, unless they were typed. A choice has an attribute for each.
KEYS = (
    *("parallel.num_replicas", "pipeline.schedule", "pipeline.num_stages", "pipeline.stages_per_rank"),
    *("pipeline.placement", "pipeline.split_backward", "pipeline.balance", "pipeline.num_microbatches"),
    *("recompute.mode", "recompute.sets", "recompute.segments", "recompute.selective", "recompute.stash"),
    "recompute.offload",
)


@dataclass(frozen=True)
class PlanProblem:
    """What is planned: layers that were measured, `batch` samples per step, and `num_ranks` ranks of all replicas.

    `held` has the values of the fixed ones of `KEYS`; `policy` has the other keys of `recompute`. `num_microbatches` and `num_replicas`
    are those to begin with. `current` are values of `KEYS` that a run has without a plan, as they are typed. `host_bytes` is the most host
    memory of a rank for offloaded sets; None: any.
    """

    profile: Profile
    batch: int
    num_ranks: int
    num_microbatches: int = 8
    num_replicas: int = 1
    policy: RecomputePolicy = field(default_factory=RecomputePolicy)
    held: Mapping[str, Any] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=Holdings)
    zero: bool = False
    host_bytes: int | None = None
    current: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One way to train. `slots` (of activations, each for a set or a part of one), `stash` (microbatches in flight) and `balance` have an
    entry per stage. Only `auto` has a stash, and a preference between F and R."""

    num_replicas: int
    num_ranks: int
    num_microbatches: int
    schedule: str
    balance: tuple[int, ...]
    mode: Mode
    segments: int | str
    selective: tuple[Outputs, ...]
    slots: tuple[int, ...] | None
    stash: tuple[int, ...] | None
    split_backward: bool = False
    prefers: Prefers = Prefers.F
    offload: Offload = Offload.NONE

    @property
    def words(self) -> dict[str, Any]:
        """The values of `KEYS`."""
        return {key: getattr(self, key.partition(".")[2]) for key in KEYS}

    @property
    def num_stages(self) -> int:
        return len(self.balance)

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    @property
    def placement(self) -> str:
        return "v" if self.schedule == "zbv" else "loop"

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return stage_ranks_of(self.placement, self.num_stages, self.num_ranks)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most microbatches in flight per stage."""
        return self.stash or (self.num_microbatches,) * self.num_stages

    def parts(self, stage: int) -> int:
        """In how many parts a stage is recomputed."""
        if isinstance(self.segments, int):
            return self.segments
        layers = self.balance[stage]
        return layers if self.segments == LAYERS else max(1, round(math.sqrt(layers)))

    @property
    def sets(self) -> float | tuple[float, ...] | None:
        """As `recompute.sets` is typed."""
        if self.slots is None:
            return None
        found = [round(slots / self.parts(stage), 4) for stage, slots in enumerate(self.slots)]
        whole = tuple(int(one) if one == int(one) else one for one in found)
        return whole[0] if len(set(whole)) == 1 else whole

    def policy(self, problem: PlanProblem, profile: Profile) -> RecomputePolicy:
        """Raises:
        ValueError: a stage has fewer layers than segments.
        """
        sets = problem.policy.sets if self.slots is None else self.sets
        wanted = replace(
            problem.policy,
            mode=self.mode,
            sets=sets,
            stash=problem.policy.stash if self.stash is None else self.stash,
            segments=self.segments,
            selective=self.selective,
            offload=self.offload,
        ).for_replicas(self.num_replicas)
        if not wanted.in_parts:
            return wanted
        return wanted.of_layers(
            self.balance, cut_by_work(bytes_of_layers(profile), self.balance), seconds_of_layers(profile)
        )

    def spec(self, problem: PlanProblem, policy: RecomputePolicy) -> ScheduleSpec:
        """What a run makes from this choice's keys."""
        plan = Plan(self.balance, self.stage_ranks, self.num_microbatches)
        return ScheduleSpec(
            family=self.schedule,
            stage_ranks=plan.stage_ranks,
            num_microbatches=self.num_microbatches,
            policy=policy,
            transport_ahead=problem.holdings.prefetch,
            split_backward=self.split_backward,
            tied=plan.tied_stages(problem.holdings.tied),
            num_replicas=self.num_replicas,
        )


def layouts_of(problem: PlanProblem) -> Iterator[tuple[int, int, int]]:
    """(replicas, ranks of a replica, microbatches) that the keys allow; each microbatch has the same number of samples."""
    profile, held = problem.profile, problem.held
    # The time of a sum over replicas is known only with a link.
    may_replicate = "parallel.num_replicas" not in held and profile.link is not None
    for replicas in _divisors(problem.num_ranks) if may_replicate else (problem.num_replicas,):
        ranks = problem.num_ranks // replicas
        if problem.batch % replicas or ranks * replicas != problem.num_ranks or ranks > profile.num_layers:
            continue
        per_rank = held.get("pipeline.stages_per_rank", 1)
        if held.get("pipeline.num_stages") not in (None, ranks * per_rank):
            continue
        wanted = held.get("pipeline.num_microbatches")
        for microbatches in _divisors(problem.batch // replicas) if wanted is None else (wanted,):
            samples = -(-problem.batch // (replicas * microbatches))
            known = profile.samples in (None, samples) or bool(profile.smaller and (profile.samples or 0) > 1)
            same = microbatches == problem.num_microbatches and replicas == problem.num_replicas
            if (known and (profile.samples or same)) and microbatches <= _MOST_MICROBATCHES:
                yield replicas, ranks, microbatches


def promising_layouts(problem: PlanProblem) -> list[tuple[int, int, int]]:
    """All layouts; of many, for each number of ranks the two that would be fastest with equal stages and without R."""
    layouts = list(layouts_of(problem))
    if len(layouts) <= _MANY_LAYOUTS:
        return layouts
    found: dict[int, list[tuple[float, tuple[int, int, int]]]] = {}
    for replicas, ranks, microbatches in layouts:
        seconds = sum(seconds_of_layers(problem.profile.at(-(-problem.batch // (replicas * microbatches))), *_F_AND_B))
        found.setdefault(ranks, []).append(((microbatches / ranks + 1) * seconds, (replicas, ranks, microbatches)))
    return [layout for rows in found.values() for _, layout in sorted(rows)[:2]]


def starts_of(problem: PlanProblem, layout: tuple[int, int, int]) -> Iterator[Choice]:
    """Where the search for choices of a layout begins."""
    ranks, held, profile = layout[1], problem.held, problem.profile
    for schedule, per_rank in _schedules(problem):
        stages = ranks * per_rank
        is_odd = per_rank > 1 and (schedule == AUTO or (ranks == 1 and "pipeline.schedule" not in held))
        if stages > profile.num_layers or is_odd:
            continue
        ways = list(_ways(problem))
        if is_coarse := schedule != AUTO and "pipeline.schedule" not in held:  # `auto` may do as well, or better
            ways = [way for way in ways if way[1:] in (ways[0][1:], (1, ()))]
        for mode, segments, selective in ways:
            for balance in _balances(problem, stages, mode, coarse=is_coarse):
                for split in _splits(problem, schedule, segments):
                    start = Choice(*layout, schedule, balance, mode, segments, selective, None, None, split)
                    offload = Offload(held.get("recompute.offload", "none"))
                    yield from _with_limits(problem, replace(start, offload=offload))


def _with_limits(problem: PlanProblem, start: Choice) -> Iterator[Choice]:
    stages, most = range(start.num_stages), start.num_microbatches
    limits: list[tuple[int, ...] | None] = [None]
    if start.schedule == AUTO:
        limits = list(dict.fromkeys(limits_of(problem, start, shape) for shape in _SHAPES))
    for own in limits:
        if start.mode is Mode.NEVER or "recompute.sets" in problem.held:
            yield replace(start, stash=own)
            continue
        few = start.schedule != AUTO and "pipeline.schedule" not in problem.held
        more = () if start.num_stages <= _MOST_ALONE else (8, 16)
        for sets in dict.fromkeys((1,) if few else (1, 2, 4, *more, most)):
            yield _fitting(replace(start, stash=own, slots=tuple(sets * start.parts(stage) for stage in stages)))
        if any(start.parts(stage) > 1 for stage in stages):
            yield replace(start, stash=own, slots=(1,) * start.num_stages)
        if start.schedule == AUTO and start.num_stages <= _FEW_STAGES:
            # A stage that keeps all its sets has no proof of R in memory: with some such stages a plan may be smaller than with all or none.
            for some in itertools.product((1, most), repeat=start.num_stages):
                slots = tuple(one * start.parts(stage) for stage, one in enumerate(some))
                yield _fitting(replace(start, stash=own, slots=slots))


def limits_of(problem: PlanProblem, choice: Choice, shape: float) -> tuple[int, ...]:
    """Microbatches in flight: `shape` more per later stage, at most `recompute.stash`."""
    last, most, stash = choice.num_stages - 1, choice.num_microbatches, problem.policy
    wanted = (
        most if math.isinf(shape) and s < last else math.ceil(1 + (last - s and (last - s) * shape))
        for s in range(last + 1)
    )
    return tuple(max(1, min(most, number, stash.stash_of(s) or most)) for s, number in enumerate(wanted))


def neighbours(problem: PlanProblem, choice: Choice) -> Iterator[Choice]:
    """Choices that differ in one respect. Many stages change together: one by one they would take all the work."""
    held, alone = problem.held, choice.num_stages <= _MOST_ALONE
    if "pipeline.balance" not in held and alone:
        for balance in moved(choice.balance, 1, far=choice.num_stages <= _FEW_STAGES):
            yield _fitting(replace(choice, balance=balance))
    if choice.slots is not None and (choice.schedule == AUTO or "pipeline.schedule" in held):
        for more in () if alone else (2, 1.5):
            yield _fitting(replace(choice, slots=tuple(math.ceil(more * slots) for slots in choice.slots)))
        every = range(choice.num_stages)
        for change, stages in itertools.product((1, -1), (every, *((stage,) for stage in every if alone))):
            slots = tuple(own + change * (stage in stages) for stage, own in enumerate(choice.slots))
            if min(slots) >= 1 and (found := _fitting(replace(choice, slots=slots))).slots == slots:
                yield found
    if choice.stash is not None:
        for shape in _SHAPES:
            yield _fitting(replace(choice, stash=limits_of(problem, choice, shape)))
        for stage, limit in enumerate(choice.stash[:-1]) if alone else ():
            least, most = choice.num_stages - stage, problem.policy.stash_of(stage) or choice.num_microbatches
            for number in {limit + 1, limit - 1} & {*range(min(least, choice.num_microbatches), most + 1)}:
                limits = (*choice.stash[:stage], number, *choice.stash[stage + 1 :])
                yield _fitting(replace(choice, stash=limits))
        if choice.mode in (Mode.EARLY, Mode.OVERLAP):
            yield from (replace(choice, prefers=one) for one in Prefers if one is not choice.prefers)


def to_host(problem: PlanProblem, choice: Choice) -> Iterator[Choice]:
    """The choice with copies of sets to host memory, where their time is known: in its slots, and in a few of each stage."""
    held, limits = problem.held, choice.stash
    if problem.profile.host is None or "recompute.offload" in held or choice.segments != 1 or limits is None:
        return
    copying = replace(choice, offload=Offload.AUTO)
    if choice.slots is None:
        if "recompute.mode" in held:
            return
        copying = replace(copying, mode=Mode.OVERLAP)
    few = [(sets,) * choice.num_stages for sets in _FEW_SETS if "recompute.sets" not in held]
    for slots in (choice.slots, *few):
        if slots is not None and any(own < limit for own, limit in zip(slots, limits)):
            yield _fitting(replace(copying, slots=slots))


def _fitting(choice: Choice) -> Choice:
    """With no more slots than its stages can use."""
    if choice.slots is None:
        return choice
    slots = (max(1, min(own, choice.in_flight[stage] * choice.parts(stage))) for stage, own in enumerate(choice.slots))
    return replace(choice, slots=tuple(slots))


def _schedules(problem: PlanProblem) -> list[tuple[str, int]]:
    """Each with its stages per rank."""
    held, several = problem.held, dict(_MORE_PER_RANK)
    per_rank = held.get("pipeline.stages_per_rank")
    if "pipeline.schedule" in held:
        name = held["pipeline.schedule"]
        return [(name, per_rank or (2 if name in several else 1))]
    more = () if held.keys() & {"pipeline.placement", "pipeline.num_stages"} else _MORE_PER_RANK
    always = problem.policy.last_stage is LastStage.ALWAYS
    one = [(name, 1) for name in _ONE_PER_RANK if not (always and name == AUTO)]
    return [pair for pair in (*one, *more) if per_rank in (None, pair[1])] or [("gpipe", per_rank or 1)]


def _splits(problem: PlanProblem, schedule: str, segments: int | str) -> tuple[bool, ...]:
    if schedule in ALWAYS_SPLIT:
        return (False,) if segments == 1 else ()
    if "pipeline.split_backward" in problem.held:
        return (bool(problem.held["pipeline.split_backward"]),)
    return (False, True) if schedule == AUTO and segments == 1 else (False,)


def _ways(problem: PlanProblem) -> Iterator[tuple[Mode, int | str, tuple[Outputs, ...]]]:
    """Mode, segments and selective: no R, R of stages, R of parts, and R without expensive operations."""
    held = problem.held
    modes = (Mode(held["recompute.mode"]),) if "recompute.mode" in held else (Mode.NEVER, Mode.OVERLAP)
    cuts = (problem.policy.segments,) if "recompute.segments" in held else _SEGMENTS
    given = problem.policy.selective
    words = {op.word for layer in problem.profile.layers for op in layer.ops if op.word}
    kept = [given] if "recompute.selective" in held else [(), *((Outputs(word),) for word in _WORDS if word in words)]
    for mode in modes:
        if mode is Mode.NEVER:
            if held.get("recompute.segments", 1) == 1 or len(modes) == 1:
                yield mode, cuts[0], given if "recompute.selective" in held else ()
            continue
        yield from ((mode, cut, kept[0]) for cut in cuts)
        yield from ((mode, cuts[0], one) for one in kept[1:])


def _balances(problem: PlanProblem, stages: int, mode: Mode, *, coarse: bool) -> list[tuple[int, ...]]:
    """All, if they are few; else equal numbers, equal work with and without R, and equal bytes."""
    held, profile = problem.held.get("pipeline.balance"), problem.profile
    if held is not None:
        return [tuple(held)] if len(held) == stages else []
    layers = profile.num_layers
    if math.comb(layers - 1, stages - 1) <= (_ALL_OF_FAMILIES if coarse else _ALL_BALANCES):
        cuts = itertools.combinations(range(1, layers), stages - 1)
        return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]
    found = plain_balances(problem, stages, (0.0,) if mode is Mode.NEVER else (0.0, 0.5, 1.0))
    return found if coarse else list(dict.fromkeys([*found, balance_by_work(bytes_of_layers(profile), stages)]))


def plain_balances(
    problem: PlanProblem, stages: int, shares: Sequence[float] = (0.0, 0.5, 1.0)
) -> list[tuple[int, ...]]:
    """Equal numbers of layers, and stages that take equally long, each of which recomputes such a share of its microbatches."""
    profile = problem.profile
    seconds, again = seconds_of_layers(profile, *_F_AND_B), seconds_of_layers(profile)
    found = [lean_balance(seconds, tuple(share * one for one in again), stages) for share in shares]
    return list(dict.fromkeys([balance_evenly(profile.num_layers, stages), *found]))


@functools.lru_cache(maxsize=256)  # layouts with the same stages ask for the same
def lean_balance(seconds: tuple[float, ...], again: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Layers per stage whose slowest stage is fastest, if all but the last one also recompute: `again` seconds per layer."""
    layers, best = len(seconds), (math.inf, balance_evenly(len(seconds), stages))
    whole = [one + more for one, more in zip(seconds, again)]
    for last in range(1, layers - stages + 2) if stages > 1 else ():
        own = sum(seconds[layers - last :])
        if own >= best[0]:
            break
        before = balance_by_work(whole[: layers - last], stages - 1)
        sums = list(itertools.accumulate(whole[: layers - last], initial=0.0))
        ends = itertools.pairwise(itertools.accumulate(before, initial=0))
        most = max(own, *(sums[end] - sums[start] for start, end in ends))
        best = min(best, (most, (*before, last)))
    return best[1]


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)
