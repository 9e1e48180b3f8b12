"""What each kind of op took more than was predicted."""

import pytest

from pipetrain.monitor.residuals import residuals
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind
from pipetrain.schedule.simulate import simulate


@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
def test_the_kind_that_was_slower_is_named(family: str) -> None:
    schedule = make_schedule(family, num_stages=3, num_microbatches=4, recompute="overlap")
    predicted = simulate(schedule, Costs.spread(3, forward=1.0, backward=2.0, recompute=1.0, hop=0.25))
    measured = simulate(schedule, Costs.spread(3, forward=1.0, backward=2.5, recompute=0.75, hop=0.5))
    found = {residual.kind: residual.residual_seconds for residual in residuals(predicted, measured)}
    expected = {Kind.F: 0.0, Kind.R: -0.25, Kind.B: 0.5, Kind.RECV_F: 0.25, Kind.RECV_B: 0.25}
    assert found == pytest.approx(expected)


def test_every_op_counts_once() -> None:
    schedule = make_schedule("gpipe", num_stages=3, num_microbatches=4, recompute="overlap")
    timeline = simulate(schedule, Costs.spread(3))
    counts = {residual.kind: residual.num_ops for residual in residuals(timeline, timeline)}
    assert counts == {Kind.F: 12, Kind.R: 8, Kind.B: 12, Kind.RECV_F: 8, Kind.RECV_B: 8}  # the last stage has no R
