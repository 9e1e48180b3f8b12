"""Costs from timelines: medians per stage and kind, hops from the moment when both ends were ready."""

import pytest

from pipetrain.monitor.measured_costs import measure_costs
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.simulate import simulate

COSTS = Costs(
    forward=(1.0, 1.5, 2.0),
    backward=(2.0, 3.0, 2.5),
    recompute=(0.5, 0.75, 1.0),
    hop_forward=(0.25, 0.5),
    hop_backward=(0.125, 1.0),
)


@pytest.mark.parametrize("mode", ["inline", "early", "overlap"])
def test_costs_come_back_from_a_simulated_step(mode: str) -> None:
    schedule = make_schedule("gpipe", num_stages=3, num_microbatches=4, recompute=mode)
    timeline = simulate(schedule, COSTS)
    found = measure_costs(3, [[timeline]])
    assert found.forward == pytest.approx(COSTS.forward)
    assert found.backward == pytest.approx(COSTS.backward)
    assert found.recompute[:2] == pytest.approx(COSTS.recompute[:2])  # the last stage has no R
    assert found.hop_forward == pytest.approx(COSTS.hop_forward)
    assert found.hop_backward == pytest.approx(COSTS.hop_backward)
    assert simulate(schedule, found).step_seconds == pytest.approx(timeline.step_seconds)


def one_hop(posted: float, sent: float, arrived: float) -> float:
    events = (
        OpEvent(0, Lane.SEND, Op.parse("0SEND_F0"), sent, arrived),
        OpEvent(1, Lane.RECV, Op.parse("1RECV_F0"), posted, arrived),
    )
    return measure_costs(2, [[Timeline(2, events)]]).hop_forward[0]


def test_a_hop_begins_when_both_ends_are_ready() -> None:
    assert one_hop(posted=0.0, sent=5.0, arrived=6.0) == 1.0
    assert one_hop(posted=5.5, sent=0.0, arrived=6.0) == 0.5
    assert one_hop(posted=0.0, sent=6.0, arrived=5.999) == 0.0  # clocks of two ranks


def test_one_slow_step_does_not_count() -> None:
    def step(seconds: float) -> Timeline:
        return Timeline(1, (OpEvent(0, Lane.COMPUTE, Op.parse("0F0"), 0.0, seconds),))

    assert measure_costs(1, [[step(1.0)], [step(9.0)], [step(1.1)]]).forward == (1.1,)
