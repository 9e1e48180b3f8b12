"""What holds for every schedule, and that `check` and an independent oracle agree on broken ones."""

import pytest
from hypothesis import HealthCheck, given, settings
from oracle import Oracle, OracleError
from random_schedules import Case, cases, mutants

from pipetrain.schedule.alive import peak_sets
from pipetrain.schedule.bound import bound, bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate
from pipetrain.timeline.breakdown import break_down

many = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
more = settings(many, max_examples=5000)


def holds(case: Case) -> None:
    schedule, policy = case.make(), case.arguments["recompute"]
    check(schedule)
    Oracle(schedule).run()
    timeline = simulate(schedule, case.costs)
    rounding = 1e-9 * (1 + timeline.step_seconds)
    assert timeline.step_seconds >= bound_of(schedule, case.costs) - rounding
    arguments = {key: case.arguments[key] for key in ("num_ranks", "placement", "first_backward")}
    arguments["split_backward"] = callable(case.arguments["family"])
    if case.arguments["family"] != "inference":
        assert (
            timeline.step_seconds >= bound(case.costs, schedule.num_microbatches, policy=policy, **arguments) - rounding
        )
    breakdown = break_down(schedule, timeline)
    for rank in breakdown:
        assert rank.busy_seconds + rank.bubble_seconds == pytest.approx(timeline.step_seconds, abs=rounding)
        assert min(rank.recompute_hidden_seconds, rank.recompute_exposed_seconds) >= -rounding
        assert rank.other_seconds <= rounding  # the simulated rank never stands idle when it could run
    if policy.mode is not Mode.NEVER:
        places = [policy.places_of(stage) for stage in range(schedule.num_stages)]
        assert all(peak.sets <= size for peak, size in zip(peak_sets(schedule), places, strict=True))
        for rank in breakdown:
            own = [size for size, holder in zip(places, schedule.stage_ranks) if holder == rank.rank]
            assert rank.peak_sets <= sum(own)


def agree(schedule: Schedule, late: Op | None) -> None:
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


@many
@given(cases())
def test_every_schedule(case: Case) -> None:
    holds(case)


@many
@given(mutants())
def test_check_accepts_what_the_oracle_finishes(mutant: tuple[Schedule, Op | None]) -> None:
    agree(*mutant)


@pytest.mark.slow
@pytest.mark.timeout(900)
@more
@given(cases())
def test_every_schedule_more(case: Case) -> None:
    holds(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@more
@given(mutants())
def test_check_accepts_what_the_oracle_finishes_more(mutant: tuple[Schedule, Op | None]) -> None:
    agree(*mutant)
