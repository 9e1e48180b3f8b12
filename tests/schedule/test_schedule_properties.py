"""What holds for every schedule: `check` agrees with an independent oracle on broken ones, and what it accepts runs to its end."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import pytest
from examples import examples
from hypothesis import event as count
from hypothesis import strategies as st
from oracle import Oracle, OracleError
from random_schedules import Case, cases, mutants, random_schedules
from spelled import in_order

from pipetrain.monitor.breakdown import break_down
from pipetrain.schedule.alive import peak_sets
from pipetrain.schedule.bound import bound, bound_of
from pipetrain.schedule.check import ScheduleError, check, sets_within_bounds
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import lower
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Keep, Mode
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate


@examples(40, 1000, cases())
def test_every_schedule(case: Case) -> None:
    schedule, policy = case.make(), case.arguments["recompute"]
    check(schedule)
    Oracle(schedule).run()
    assert in_order(schedule, Kind.B)
    timeline = simulate(schedule, case.costs)
    rounding = 1e-9 * (1 + timeline.step_seconds)
    assert timeline.step_seconds >= bound_of(schedule, case.costs) - rounding
    arguments = {key: case.arguments[key] for key in ("num_ranks", "placement", "first_backward")}
    arguments["split_backward"] = case.is_split
    if case.arguments["family"] != "inference":
        assert (
            timeline.step_seconds >= bound(case.costs, schedule.num_microbatches, policy=policy, **arguments) - rounding
        )
    breakdown = break_down(schedule, timeline)
    for rank in breakdown:
        assert rank.busy_seconds + rank.bubble_seconds == pytest.approx(timeline.step_seconds, abs=rounding)
        assert min(rank.recompute_hidden_seconds, rank.recompute_exposed_seconds) >= -rounding
        assert rank.unexplained_seconds <= rounding  # the simulated rank never stands idle when it could run
    if policy.mode is not Mode.NEVER:
        places = [policy.places_of(stage) for stage in range(schedule.num_stages)]
        assert all(peak.places <= size for peak, size in zip(peak_sets(schedule), places, strict=True))
        for rank in breakdown:
            own = [places[stage] / policy.num_parts(stage) for stage in stages_of(schedule, rank.rank)]
            assert rank.peak_sets <= sum(own) + rounding


def stages_of(schedule: Schedule, rank: int) -> list[int]:
    return [stage for stage, holder in enumerate(schedule.stage_ranks) if holder == rank]


@examples(40, 1000, mutants())
def test_check_accepts_what_the_oracle_finishes(mutant: tuple[Schedule, Op | None]) -> None:
    schedule, late = mutant
    complaint = fault = None
    try:
        Oracle(schedule).run()
        Oracle(schedule, late=late).run()
    except OracleError as error:
        complaint = error
    try:
        check(schedule)
    except ScheduleError as error:
        fault = error
    assert (complaint is None) == (fault is None), f"oracle: {complaint}; check: {fault}"


@st.composite
def kept_anyhow(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """A schedule in which any sets are kept: most have no room for all of them."""
    case = draw(cases(max_ranks=3, max_microbatches=6))
    made = case.make()
    modes = st.sampled_from([mode for mode in Mode if mode is not Mode.NEVER])
    parts = made.policy.segments
    places = draw(st.integers(1, 4 * parts))
    sets = places if parts == 1 else places / parts
    policy = dataclasses.replace(made.policy, mode=draw(modes), sets=sets, keep=Keep.AUTO)
    compute = tuple({Lane.COMPUTE: tuple(whole(lanes[Lane.COMPUTE]))} for lanes in made.lanes)
    draft = dataclasses.replace(made, policy=policy, lanes=compute, waits={}, kept=frozenset())
    chosen = st.tuples(st.integers(0, made.num_stages - 1), st.integers(0, made.num_microbatches - 1))
    return lower(draft, draw(st.frozensets(chosen, max_size=6)), case.costs), case.costs


def whole(compute: Iterable[Op]) -> Iterator[Op]:
    """Without R, and each B as a whole."""
    return (op._replace(part=None) for op in compute if op.kind is not Kind.R and not op.part)


@examples(60, 150, kept_anyhow())
def test_any_choice_of_kept_sets_has_room_or_is_refused(given_sets: tuple[Schedule, Costs]) -> None:
    """Where there is room no timing takes more places, and no bound is above the step; where there is none, `check` says so."""
    schedule, costs = given_sets
    fault = next(sets_within_bounds(schedule), None)
    if fault is not None:
        with pytest.raises(ScheduleError, match=r"sets alive at once, but only \d+ activation slots?"):
            check(schedule)
        return
    check(schedule)
    oracle = Oracle(schedule)
    oracle.run()
    assert [peak.places for peak in peak_sets(schedule)] == oracle.peaks
    step = simulate(schedule, costs).step_seconds
    rounding = 1e-9 * (1 + step)
    assert bound_of(schedule, costs) <= step + rounding


def refusal(schedule: Schedule) -> str:
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


@examples(60, 500, random_schedules())
def test_what_check_accepts_runs_and_what_it_refuses_it_names(drawn: tuple[Schedule, Costs]) -> None:
    schedule, costs = drawn
    error = refusal(schedule)
    count("refused" if error else "accepted")
    if error:
        named = error.splitlines()[1].split(":")[0]
        there = {str(op) for _, _, op in schedule.ops()} | {str(op) for op in schedule.waits}
        assert named in there or f"{named}: is missing" in error, error
    else:
        obeys(schedule, costs)


def obeys(schedule: Schedule, costs: Costs) -> None:
    timeline = simulate(schedule, costs)
    started = {event.op: event.start for event in timeline.events}
    ended = {event.op: event.end for event in timeline.events}
    rounding = 1e-9 * (1 + timeline.step_seconds)
    for op, awaited in schedule.waits.items():
        assert all(ended[other] <= started[op] + rounding for other in awaited), op
    for rank in range(schedule.num_ranks):
        for lane in (Lane.COMPUTE, Lane.RECOMPUTE):
            for first, second in itertools.pairwise(schedule.lane(rank, lane)):
                assert ended[first] <= started[second] + rounding, second
    assert set(ended) == {op for _, _, op in schedule.ops()}
