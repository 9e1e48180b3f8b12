"""Microbatches taken out of a schedule: what is left is sound, and comes after what it came after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import pytest
from examples import examples
from hypothesis import strategies as st
from random_schedules import random_schedules

from pipetrain.schedule.alive import peak_sets, peak_stash
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import MESSAGE_LANES, TRANSFER_LANES
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.without import without_microbatches


@st.composite
def sound_and_skipped(draw: st.DrawFn, max_microbatches: int = 6) -> tuple[Schedule, Costs, frozenset[int]]:
    """A schedule that `check` accepts, with some of its microbatches, but not all."""
    schedule, costs = draw(random_schedules(max_ranks=4, max_microbatches=max_microbatches).filter(is_sound))
    left = draw(st.integers(0, schedule.num_microbatches - 1))
    others = [number for number in range(schedule.num_microbatches) if number != left]
    return schedule, costs, draw(st.frozensets(st.sampled_from(others)) if others else st.just(frozenset()))


def is_sound(drawn: tuple[Schedule, Costs]) -> bool:
    try:
        check(drawn[0])
    except ScheduleError:
        return False
    return True


def holds(schedule: Schedule, costs: Costs, skipped: frozenset[int]) -> None:
    rest = without_microbatches(schedule, skipped)
    check(rest)
    simulated = simulate(rest, costs)
    assert simulated.step_seconds >= bound_of(rest, costs) * (1 - 1e-9)
    assert {event.op for event in simulated.events} == {op for _, _, op in left(schedule, skipped)}
    assert list(rest.ops()) == list(left(schedule, skipped))
    assert rest.kept == {place for place in schedule.kept if place[1] not in skipped}
    for new, old in zip(peak_sets(rest), peak_sets(schedule)):
        assert new.sets <= old.sets
    assert all(new <= old for new, old in zip(peak_stash(rest), peak_stash(schedule)))
    before, after = came_before(schedule), came_before(rest)
    for op in after:
        assert after[op] == {other for other in before[op] if other.microbatch not in skipped}, op


def left(schedule: Schedule, skipped: frozenset[int]) -> Iterator[tuple[int, Lane, Op]]:
    return (entry for entry in schedule.ops() if entry[2].microbatch not in skipped)


def came_before(schedule: Schedule) -> Mapping[Op, frozenset[Op]]:
    """Of each op, those of its rank that have ended when it starts, whatever the timing; by the definition."""
    before: dict[Op, Op] = {}
    last: dict[object, Op] = {}
    transfers = set()
    for rank, lane, op in schedule.ops():
        queue = (rank, lane, op.stage, op.kind) if lane in MESSAGE_LANES else (rank, lane)
        if queue in last:
            before[op] = last[queue]
        last[queue] = op
        if lane in TRANSFER_LANES:
            transfers.add(op)
    known: dict[Op, frozenset[Op]] = {}

    def at_end(op: Op) -> frozenset[Op]:
        return at_start(op) | {op} | (at_end(before[op]) if op in before else frozenset())

    def at_start(op: Op) -> frozenset[Op]:
        if op not in known:
            ended = frozenset[Op]().union(*(at_end(other) for other in schedule.waits.get(op, ())))
            if op in before:
                ended |= at_start(before[op]) if op in transfers else at_end(before[op])
            known[op] = ended
        return known[op]

    return {op: at_start(op) for _, _, op in schedule.ops()}


@examples(40, 1000, sound_and_skipped(max_microbatches=9))
def test_what_is_left_is_sound(drawn: tuple[Schedule, Costs, frozenset[int]]) -> None:
    holds(*drawn)


def waits_of(schedule: Schedule, op: str) -> set[str]:
    return set(map(str, schedule.waits.get(Op.parse(op), ())))


def test_the_place_of_a_set_is_still_waited_for() -> None:
    """[1] R2 waited for B1, which is gone: it waits for B0, which freed the place before."""
    schedule = make_schedule(num_stages=2, num_microbatches=3)
    assert waits_of(schedule, "0R2") == {"0F2", "0B1"}
    rest = without_microbatches(schedule, frozenset({1}))
    assert waits_of(rest, "0R2") == {"0F2", "0B0"}
    assert rest.lane(0, Lane.COMPUTE) == tuple(map(Op.parse, ["0F0", "0F2", "0B0", "0B2"]))
    assert rest.microbatches == (0, 2)


def test_a_wait_for_what_is_gone_is_one_for_what_ended_before_it() -> None:
    """[1] F3 waited until the output of 1 had left, and with it that of 0: a bound on what is not sent."""
    schedule = make_schedule(num_stages=2, num_microbatches=4)
    bounded = dataclasses.replace(schedule, waits={**schedule.waits, Op.parse("0F3"): (Op.parse("0SEND_F1"),)})
    check(bounded)
    assert waits_of(without_microbatches(bounded, frozenset({1})), "0F3") == {"0SEND_F0"}


def test_waits_of_what_is_gone_are_those_of_the_next() -> None:
    """[2] Only the first send of the queue waited for the F of both."""
    schedule = make_schedule(num_stages=2, num_microbatches=3)
    waits = {**schedule.waits, Op.parse("0SEND_F0"): (Op.parse("0F1"),), Op.parse("0SEND_F1"): ()}
    changed = dataclasses.replace(schedule, waits=waits)
    check(changed)
    rest = without_microbatches(changed, frozenset({0}))
    check(rest)
    assert waits_of(rest, "0SEND_F1") == {"0F1"}


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
def test_of_a_family_no_wait_is_added(family: str, mode: str) -> None:
    """What an op waits for is of its own microbatch, or the next best to what it waited for: nothing piles up."""
    policy = RecomputePolicy(mode=mode, sets=2, keep="none", last_stage="always")  # type: ignore[arg-type]
    schedule = make_schedule(
        family, num_stages=4, num_ranks=2 if family == "interleaved" else 4, num_microbatches=9, recompute=policy
    )
    rest = without_microbatches(schedule, frozenset({0, 3, 4, 8}))
    check(rest)
    for op, awaited in rest.waits.items():
        assert len(awaited) <= len(schedule.waits[op]), op


def test_microbatches_that_cannot_be_left_out() -> None:
    schedule = make_schedule(num_stages=2, num_microbatches=3)
    assert without_microbatches(schedule, frozenset()) is schedule
    for skipped in ({0, 1, 2}, {3}):
        with pytest.raises(ValueError, match="cannot leave out microbatches"):
            without_microbatches(schedule, frozenset(skipped))
    rest = without_microbatches(schedule, frozenset({1}))
    assert without_microbatches(rest, frozenset({0})) == without_microbatches(schedule, frozenset({0, 1}))
    with pytest.raises(ScheduleError, match="the schedule skips microbatch 1"):
        check(dataclasses.replace(schedule, skipped=frozenset({1})))
