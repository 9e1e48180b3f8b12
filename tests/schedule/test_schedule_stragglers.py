"""Ranks that are slower than they were, or than their like; noise and load on all ranks alike are not named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from pipetrain.monitor.stragglers import EARLY_STEPS, LIMIT, WINDOW_STEPS, Straggler, StragglerWatch
from pipetrain.plan.mesh import RankPlace
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.op import Kind, Lane, Op

SECONDS = {Kind.F: 1.0, Kind.B: 2.0, Kind.R: 1.0}
Slowness = Callable[[int, int, Kind], float]  # of step, rank and kind


def timeline(step: int, num_ranks: int, slowness: Slowness) -> Timeline:
    def event(rank: int, microbatch: int, kind: Kind) -> OpEvent:
        start, seconds = 10.0 * microbatch, SECONDS[kind] * slowness(step, rank, kind)
        return OpEvent(rank, Lane.COMPUTE, Op(rank, kind, microbatch), start, start + seconds)

    return Timeline(num_ranks, tuple(itertools.starmap(event, itertools.product(range(num_ranks), range(4), SECONDS))))


def watched(
    num_steps: int, slowness: Slowness, *, num_ranks: int = 4, work: dict[int, int] | None = None
) -> tuple[Straggler, ...]:
    watch = StragglerWatch(work or {})
    for step in range(1, num_steps + 1):
        watch.add(step, timeline(step, num_ranks, slowness))
    return watch.stragglers()


def test_a_rank_that_becomes_slow_is_named_with_kind_ratio_and_step() -> None:
    slow = watched(80, lambda step, rank, kind: 2.0 if step >= 40 and rank == 2 and kind is Kind.B else 1.0)
    assert slow == (Straggler(2, "B", 2.0, 40, "start"),)


def test_a_slow_time_that_ended_is_named_too_if_it_was_long() -> None:
    def slowness(step: int, rank: int, kind: Kind) -> float:
        return 1.5 if rank == 0 and kind is Kind.F and 30 <= step < 60 else 1.0

    assert watched(100, slowness) == (Straggler(0, "F", 1.5, 30, "start"),)


def test_one_slow_step_is_no_straggler() -> None:
    assert watched(60, lambda step, rank, kind: 9.0 if rank == 1 and step % 20 == 0 else 1.0) == ()


def test_the_first_step_does_not_count() -> None:
    assert watched(60, lambda step, rank, kind: 50.0 if step == 1 else 1.0) == ()


def test_load_on_every_rank_alike_is_no_straggler() -> None:
    assert watched(60, lambda step, rank, kind: 3.0 if step > 30 else 1.0) == ()
    uneven = watched(60, lambda step, rank, kind: (6.0 if rank == 3 else 3.0) if step > 30 else 1.0)
    assert {(one.rank, one.kind, one.ratio) for one in uneven} == {(3, kind, 2.0) for kind in "FBR"}


def test_noise_is_no_straggler() -> None:
    chance = random.Random(0)
    assert watched(300, lambda step, rank, kind: chance.uniform(0.85, 1.15)) == ()


def test_a_rank_that_was_slow_from_the_start_is_compared_with_equal_work() -> None:
    def slowness(step: int, rank: int, kind: Kind) -> float:
        return 1.6 if rank == 2 else 4.0 if rank == 4 else 1.0

    slow = watched(30, slowness, num_ranks=5, work={1: 3, 2: 3, 3: 3})
    assert [(one.rank, one.kind, one.since_step, one.against) for one in slow] == [
        (2, kind, 1, "others") for kind in ("B", "F", "R")
    ]
    assert all(one.ratio == pytest.approx(1.6) for one in slow)


def test_a_short_run_names_nobody() -> None:
    steps = EARLY_STEPS + WINDOW_STEPS
    assert watched(steps, lambda step, rank, kind: 1.0 + LIMIT * (rank == 0 and step > 4)) == ()


def two_by_two(step: int, slowness: Slowness) -> tuple[Timeline, Timeline]:
    """Two replicas of two ranks; in each its ranks count from 0."""
    return tuple(
        timeline(step, 2, lambda step, place, kind, replica=replica: slowness(step, 2 * replica + place, kind))
        for replica in range(2)
    )  # type: ignore[return-value]


def places(order: tuple[int, ...]) -> list[RankPlace]:
    """`order`: the rank at each place of replica 0, then of replica 1."""
    return sorted(
        (RankPlace(rank, number // 2, number % 2, (number % 2,)) for number, rank in enumerate(order)),
        key=lambda where: where.rank,
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_a_slow_replica_is_named_by_the_ranks_of_the_run(order: tuple[int, ...]) -> None:
    """From the start, as no work need be known: the same place of another replica has the same to do."""
    watch = StragglerWatch({}, places(order))
    for step in range(1, 31):
        watch.add(step, *two_by_two(step, lambda step, number, kind: 2.0 if number >= 2 else 1.0))
    found = watch.stragglers()
    assert {one.rank for one in found} == {order[2], order[3]}
    assert {(one.against, one.ratio) for one in found} == {("others", 2.0)}


def test_a_rank_of_a_replica_that_becomes_slow() -> None:
    watch = StragglerWatch({}, places((0, 1, 2, 3)))
    for step in range(1, 81):
        slow = two_by_two(
            step, lambda step, number, kind: 2.0 if step >= 40 and number == 3 and kind is Kind.B else 1.0
        )
        watch.add(step, *slow)
    assert watch.stragglers() == (Straggler(3, "B", 2.0, 40, "start"),)
