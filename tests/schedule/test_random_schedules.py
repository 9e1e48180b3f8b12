"""What `check` accepts, a simulated step runs to its end, with every wait and queue obeyed; what it refuses, it names."""

import itertools

from examples import examples
from hypothesis import event as count
from random_schedules import random_schedules

from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.op import Lane
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate


def refusal(schedule: Schedule) -> str:
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def holds(schedule: Schedule, costs: Costs) -> None:
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


@examples(60, 2000, random_schedules())
def test_random_schedules(drawn: tuple[Schedule, Costs]) -> None:
    holds(*drawn)
