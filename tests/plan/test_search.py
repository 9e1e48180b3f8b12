"""The search for orders: what it reaches, what it proves, that it is never worse than a named family, and what it keeps.

`orders.json` holds orders that took minutes of search; `python tests/plan/seek.py` searches for them again.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from problems import Cell, cells

from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import RECOMPUTE
from pipetrain.schedule.make import make, problem_of
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.policy import Keep, Mode, RecomputePolicy
from pipetrain.schedule.recompute import AllKept
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import MOST_COMPARED, ScheduleSpec
from pipetrain.schedule.search import search
from pipetrain.schedule.search.list_order import Effort, OrderProblem, climb, list_order
from pipetrain.schedule.search.polish import Polished, polish
from pipetrain.schedule.search.search import CachedOrder, FoundSchedule, best_schedule, write_order
from pipetrain.schedule.simulate import simulate

RULE_ALONE = Effort(0)
A_LITTLE = Effort(60, rules=50, steps=0.2)
NEAR = 1.02


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_what_is_to_be_reached_is_reached(cell: Cell) -> None:
    schedule = make(cell.spec)
    check(schedule)
    taken = simulate(schedule, cell.costs).step_seconds
    assert taken <= (cell.goal if cell.is_exact or cell.split else cell.goal * NEAR)
    assert not cell.is_exact or taken == cell.goal, "less than what was proven to be the least"


@pytest.mark.parametrize(
    "cell",
    [
        Cell(4, 8, 0, 1, 36),
        Cell(8, 8, 0, 1, 48),
        pytest.param(Cell(8, 8, 0, 2, 38, split=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_search_finds_the_least_and_proves_it(cell: Cell) -> None:
    spec = cell.unsolved
    assert best_schedule(spec, cell.costs, RULE_ALONE).seconds > cell.goal
    found = best_schedule(spec, cell.costs, dataclasses.replace(A_LITTLE, steps=10))
    check(found.schedule)
    assert (found.seconds, found.least_seconds, found.is_proven) == (cell.goal, cell.goal, True)
    assert simulate(found.schedule, cell.costs).step_seconds == cell.goal


def all_orders(problem: OrderProblem) -> Iterator[tuple[tuple[Op, ...], ...]]:
    """Every order of every stage with each choice of kept sets that fits its places: an oracle for two stages."""
    microbatches = range(problem.num_microbatches)
    last = tuple(Op(1, kind, i) for i in microbatches for kind in (Kind.F, Kind.B))
    kinds = {kind: [Op(0, kind, i) for i in microbatches] for kind in (Kind.F, Kind.R, Kind.B)}
    for size in range(problem.num_microbatches + 1):
        for kept in itertools.combinations(microbatches, size):
            again = [op for op in kinds[Kind.R] if op.microbatch not in kept]
            ops = [*kinds[Kind.F], *again, *kinds[Kind.B]]
            words = [op.kind for op in ops]
            for word in set(itertools.permutations(words)):
                queues = {Kind.F: iter(kinds[Kind.F]), Kind.R: iter(again), Kind.B: iter(kinds[Kind.B])}
                lane = tuple(next(queues[kind]) for kind in word)
                if fits(lane, kept, problem.places_of(0)):
                    yield lane, last


def fits(lane: tuple[Op, ...], kept: tuple[int, ...], places: int) -> bool:
    alive: set[int | None] = set()
    done: set[tuple[Kind, int | None]] = set()
    for op in lane:
        if op.kind is RECOMPUTE and (Kind.F, op.microbatch) not in done:
            return False
        if op.kind is Kind.B:
            if op.microbatch not in alive:
                return False
            alive.discard(op.microbatch)
        elif op.kind is RECOMPUTE or op.microbatch in kept:
            alive.add(op.microbatch)
            if len(alive) > places:
                return False
        done.add((op.kind, op.microbatch))
    return True


def step_of(problem: OrderProblem, lanes: tuple[tuple[Op, ...], ...]) -> float:
    """When the last op ends, each stage going through its lane as soon as it can; inf where they wait for each other."""
    ended: dict[Op, float] = {}
    todo, free = [list(lane) for lane in lanes], [0.0, 0.0]
    while any(todo):
        ready = [
            (stage, source)
            for stage, lane in enumerate(todo)
            if lane
            for source in [Op(1 - stage, lane[0].kind, lane[0].microbatch)]
            if (lane[0].kind, stage) not in ((Kind.F, 1), (Kind.B, 0)) or source in ended
        ]
        if not ready:
            return float("inf")
        stage, source = ready[0]
        op = todo[stage].pop(0)
        comes = (op.kind, stage) in ((Kind.F, 1), (Kind.B, 0))
        hops = problem.costs.hop_forward if op.kind is Kind.F else problem.costs.hop_backward
        free[stage] = max(free[stage], ended[source] + hops[0] if comes else 0.0) + problem.costs.of(op.kind)[stage]
        ended[op] = free[stage]
    return max(free)


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize(
    "costs",
    [
        Costs.spread(2),
        Costs((1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (0.5,), (0.25,)),
        Costs((0.37, 1.21), (1.9, 0.63), (0.41, 1.0), (0.13,), (0.77,)),  # nothing is a multiple of anything
    ],
)
def test_nothing_beats_what_is_proven(costs: Costs, places: int) -> None:
    spec = ScheduleSpec("auto", (0, 1), 3, RecomputePolicy(sets=places), costs=costs)
    problem, start = problem_of(spec, costs), make(spec)
    least = min(step_of(problem, lanes) for lanes in all_orders(problem))
    polished = polish(problem, start, Effort(60))
    best = [step_of(problem, polished.order.lanes)] if polished.order else []
    assert min([simulate(start, costs).step_seconds, *best]) == pytest.approx(least)
    assert least * (1 - 2e-3) <= polished.least_seconds <= least * (1 + 1e-9)


def instances(count: int) -> Iterator[tuple[ScheduleSpec, Costs]]:
    """Problems with costs, hops and places of each stage's own."""
    chance = random.Random(7)
    for _ in range(count):
        stages, microbatches = chance.randint(2, 5), chance.randint(2, 10)

        def times(number: int, least: float, most: float) -> tuple[float, ...]:
            return tuple(round(chance.uniform(least, most), 2) for _ in range(number))

        computing = [times(stages, least, most) for least, most in ((0.5, 2), (0.5, 4), (0.2, 2))]
        costs = Costs(*computing, times(stages - 1, 0, 1), times(stages - 1, 0, 1))
        policy = RecomputePolicy(
            mode=chance.choice([Mode.OVERLAP, Mode.OVERLAP, Mode.EARLY, Mode.INLINE, Mode.NEVER]),
            sets=tuple(chance.randint(1, 4) for _ in range(stages)),
            stash=chance.choice([None, None, chance.randint(stages, microbatches + stages)]),
        )
        spec = ScheduleSpec("auto", tuple(range(stages)), microbatches, policy, split_backward=chance.random() < 0.3)
        yield spec, costs


@pytest.mark.slow
@pytest.mark.parametrize(("count", "effort"), [(120, RULE_ALONE), (10, A_LITTLE)], ids=str)
def test_never_worse_than_a_named_family(count: int, effort: Effort) -> None:
    compared = 0
    for spec, costs in instances(count):
        found = best_schedule(spec, costs, effort)
        check(found.schedule)
        assert found.schedule.family == "auto"
        assert found.seconds == simulate(found.schedule, costs).step_seconds
        assert found.seconds >= found.least_seconds * (1 - 1e-9)
        for family in ("gpipe", "1f1b", *(["zb-h1"] if spec.split_backward else [])):
            try:
                split = spec.split_backward and family != "zb-h1"
                named = make(dataclasses.replace(spec, family=family, costs=costs, split_backward=split))
            except ValueError:
                continue  # it holds more than the stash
            compared += 1
            taken = simulate(named, costs).step_seconds
            assert found.seconds <= taken * (1 + 1e-9), f"{family} is faster: {spec} {costs}"
    assert compared > count


def test_without_ortools_rules_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(4, 8, 0, 1, 36)
    spec = cell.unsolved
    monkeypatch.setattr(search, "can_polish", lambda: False)
    effort = Effort(600, rules=1000)
    found = best_schedule(spec, cell.costs, effort)
    problem = problem_of(spec, cell.costs)
    assert found.seconds == cell.goal < list_order(problem).seconds
    assert climb(problem, effort, cell.goal).seconds == found.seconds, "the same effort, the same order"


def test_the_search_may_start_from_a_schedule_that_recomputes_a_stage_which_it_keeps() -> None:
    """A stage with a slot for each of its sets has no R in the model of the search; the family that is best so far may have one."""
    costs = Costs.spread(4, hop=2.0)
    costs = dataclasses.replace(costs, forward=(1, 3, 1, 1), backward=(2, 2, 3, 2), recompute=(1, 1, 1, 1))
    policy = RecomputePolicy(Mode.EARLY, sets=(1, 6, 1, 6), keep=Keep.AUTO)
    found = best_schedule(
        ScheduleSpec("auto", (0, 1, 2, 3), 6, policy, costs=costs), costs, Effort(60, rules=1, steps=0.05)
    )
    assert found.seconds == 50.0


def test_as_many_steps_find_the_same_order() -> None:
    spec = Cell(4, 8, 0, 1, 36).unsolved
    found = [polish(problem_of(spec, Costs.spread(4)), make(spec), Effort(60, steps=0.02)) for _ in range(2)]
    assert found[0].order is not None
    assert found[0] == found[1]


def test_a_polished_order_is_one_of_the_problem() -> None:
    cell = Cell(3, 5, 0.5, 1, 0)
    policies = ({}, {"mode": Mode.INLINE}, {"mode": Mode.EARLY}, {"mode": Mode.NEVER}, {"stash": (2, 2, 1)})
    for number, changes in enumerate(policies):
        policy = RecomputePolicy(**{"sets": (1, 2, 1), **changes})
        for split, first in ((False, number % 2), (True, (number + 1) % 2)):  # any two of the three meet
            spec = dataclasses.replace(cell.spec, order=None, policy=policy, split_backward=split, first_backward=first)
            found = best_schedule(spec, cell.costs, A_LITTLE)
            check(found.schedule)
            assert found.schedule.policy == policy
            assert found.seconds >= found.least_seconds


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Effort]:
    """The efforts of searches, which last no time and find nothing new."""
    found: list[Effort] = []

    def short(problem: OrderProblem, start: Schedule, effort: Effort) -> Polished:
        found.append(effort)
        return Polished(None, simulate(start, problem.costs).step_seconds - 1)

    monkeypatch.setattr(search, "polish", short)
    monkeypatch.setattr(search, "climb", lambda problem, effort, least_seconds: list_order(problem))
    return found


def test_what_was_found_is_kept(tmp_path: Path, searches: list[Effort]) -> None:
    cell = Cell(4, 16, 0, 1, 66)
    spec = cell.unsolved
    said: list[str] = []

    def seek(effort: Effort, costs: Costs = cell.costs) -> FoundSchedule:
        return best_schedule(spec, costs, effort, tmp_path / "orders", said.append)

    seek(RULE_ALONE)
    assert not (tmp_path / "orders").exists()
    first = seek(Effort(30))
    assert (first.seconds, first.least_seconds) == (69, 68)
    assert said == ["searching for an order for pipeline.schedule=auto, for 30 s at most (pipeline.search_seconds)"]
    assert seek(Effort(30)) == seek(Effort(20)) == first
    assert searches == [Effort(27)], "known"
    assert seek(Effort(40)) == first
    assert searches == [Effort(27), Effort(36)], "a longer search goes on"
    seek(Effort(30), Costs.spread(4, forward=1.25))
    assert len(searches) == 3, "other costs"
    for file in (tmp_path / "orders").iterdir():
        file.write_text(file.read_text()[:-9])
    assert seek(Effort(30)) == first
    assert len(searches) == 4, "a file that cannot be read is as none"


def test_an_order_in_the_cache_is_checked(tmp_path: Path, searches: list[Effort]) -> None:
    cell = Cell(4, 16, 0, 1, 66)
    spec = cell.unsolved
    (better,) = [stored.spec.order for stored in cells() if str(stored) == str(cell)]
    assert better is not None
    write_order(tmp_path, spec, cell.costs, CachedOrder(better, 66, 30))
    assert best_schedule(spec, cell.costs, Effort(30), tmp_path).is_proven
    wrong = [[op for op in lane if op.kind is not RECOMPUTE] for lane in better]  # with a place for none of the sets
    write_order(tmp_path, spec, cell.costs, CachedOrder(AllKept(wrong), 66, 30))
    assert best_schedule(spec, cell.costs, Effort(30), tmp_path).seconds == 69
    assert not searches


def test_nothing_is_kept_where_nothing_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "orders").write_text("a file")
    cell = Cell(3, 4, 0, 1, 0)
    best_schedule(cell.unsolved, cell.costs, A_LITTLE, tmp_path / "orders")


# Of a schedule with very many microbatches one order is made, where of fewer the fastest of several is taken.
MANY = MOST_COMPARED // 2 + 1


@pytest.mark.quick("auto")
@pytest.mark.parametrize("family", ["zb-h1", "auto"])
def test_a_schedule_of_very_many_microbatches_is_sound(family: str) -> None:
    check(make(ScheduleSpec(family, (0, 1), MANY, costs=Costs.spread(2))))


@pytest.mark.slow
def test_nothing_is_searched_for_where_one_order_takes_seconds() -> None:
    costs, told = Costs.spread(2), list[str]()
    spec = ScheduleSpec("auto", (0, 1), MANY, costs=costs)
    found = best_schedule(spec, costs, Effort(0.5), say=told.append)
    assert told == []
    assert found.schedule.lanes == make(spec).lanes
    assert found.least_seconds <= found.seconds
