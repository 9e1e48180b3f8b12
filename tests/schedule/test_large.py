"""Of a schedule with very many microbatches one order is made, where of fewer the fastest of several is taken: no search, and it is checked."""

import pytest

from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make, make_schedule
from pipetrain.schedule.schedule_spec import MOST_COMPARED, ScheduleSpec
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import best_schedule

STAGES = 2
MICROBATCHES = MOST_COMPARED // STAGES + 1
COSTS = Costs.spread(STAGES)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("family", ["zb-h1", "auto"])
def test_it_is_sound(family: str) -> None:
    check(make_schedule(family, num_stages=STAGES, num_microbatches=MICROBATCHES, costs=COSTS))


@pytest.mark.slow
def test_nothing_is_searched_for_where_one_order_takes_seconds() -> None:
    spec = ScheduleSpec("auto", tuple(range(STAGES)), MICROBATCHES, costs=COSTS)
    told: list[str] = []
    found = best_schedule(spec, COSTS, Effort(0.5), say=told.append)
    assert told == []
    assert found.schedule.lanes == make(spec).lanes
    assert found.least_seconds <= found.seconds
