"""Where the time goes: simulated steps, and a measured one in which R runs beside B."""

import pytest
from shows import show

from pipetrain.monitor.breakdown import break_down, bubble_fraction, bytes_over_time, sets_over_time
from pipetrain.monitor.draw.page import schedules_table
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import RecomputePolicy


@pytest.mark.parametrize(
    ("mode", "hidden", "exposed", "sets"),
    [
        ("never", [0, 0, 0, 0], [0, 0, 0, 0], [8, 8, 8, 1]),
        ("inline", [0, 0, 0, 0], [8, 8, 8, 0], [1, 1, 1, 1]),
        ("early", [8, 8, 0, 0], [0, 0, 8, 0], [1, 1, 1, 1]),
        ("overlap", [8, 8, 0, 0], [0, 0, 8, 0], [1, 1, 1, 1]),
    ],
)
def test_four_stages_and_eight_microbatches(mode: str, hidden: list, exposed: list, sets: list) -> None:
    shown = show(num_stages=4, num_microbatches=8, recompute=mode)
    assert [rank.recompute_hidden_seconds for rank in shown.breakdown] == hidden
    assert [rank.recompute_exposed_seconds for rank in shown.breakdown] == exposed
    assert [rank.peak_sets for rank in shown.breakdown] == sets


def test_bubble_by_cause() -> None:
    first, middle, last = show(num_stages=3, num_microbatches=2, recompute="never").breakdown
    assert (first.fill_seconds, first.wait_gradient_seconds, first.drain_seconds) == (0, 6, 0)
    assert (middle.fill_seconds, middle.wait_gradient_seconds, middle.drain_seconds) == (1, 3, 2)
    assert (last.fill_seconds, last.wait_activation_seconds, last.drain_seconds) == (2, 0, 4)
    assert [rank.bubble_seconds for rank in (first, middle, last)] == [6, 6, 6]


def test_waiting_for_an_activation_over_a_slow_link() -> None:
    shown = show(num_stages=2, num_microbatches=3, recompute="never", costs=Costs.spread(2, hop=[4.0]))
    last = shown.breakdown[1]
    assert last.fill_seconds == 5
    assert last.wait_activation_seconds == 2 * 1  # a tensor every 4 seconds, 3 seconds of work for each


def test_waits_of_a_rank_with_less_work_are_imbalance() -> None:
    costs = Costs.spread(2, forward=[3, 1], backward=[3, 1])
    shown = show(num_stages=2, num_microbatches=4, recompute="never", costs=costs)
    quick = shown.breakdown[1]
    assert quick.imbalance_seconds == 3  # three gaps of 1 second; it has 16 seconds less to do
    assert quick.wait_activation_seconds == 0


def test_bubble_fraction_is_bubble_over_all_ranks() -> None:
    shown = show(num_stages=4, num_microbatches=8, recompute="never")
    assert shown.bubble_fraction == pytest.approx(1 - 4 * 8 * 3 / (4 * 33))
    assert bubble_fraction(()) == 0


def measured(*events: tuple[Lane, str, float, float]) -> Timeline:
    return Timeline(1, tuple(OpEvent(0, lane, Op.parse(op), start, end) for lane, op, start, end in events))


def test_a_measured_step_in_which_r_runs_beside_b() -> None:
    """Rank 0 of two: R1 starts during B0 and ends after it; the gradient of B1 came at 7.5."""
    schedule = make_schedule(num_stages=2, num_microbatches=2, recompute=RecomputePolicy(sets=2, keep="none"))
    timeline = measured(
        (Lane.COMPUTE, "0F0", 0, 1),
        (Lane.COMPUTE, "0F1", 1, 2),
        (Lane.RECV, "0RECV_B0", 2, 5),
        (Lane.RECOMPUTE, "0R0", 3, 4),
        (Lane.RECV, "0RECV_B1", 5, 7.5),
        (Lane.COMPUTE, "0B0", 5, 7),
        (Lane.RECOMPUTE, "0R1", 6, 9),
        (Lane.COMPUTE, "0B1", 9.5, 11),
    )
    (rank,) = break_down(schedule, timeline)
    assert rank.busy_seconds == 2 + 1 + 4 + 1.5
    assert rank.recompute_exposed_seconds == 9 - 7.5  # after the gradient came, while B1 did not run
    assert rank.recompute_hidden_seconds == 1 + 1.5
    assert rank.wait_gradient_seconds == 1 + 1  # 2-3 and 4-5
    assert rank.unexplained_seconds == 0.5  # 9-9.5: all was there
    assert rank.peak_sets == 2
    assert rank.busy_seconds + rank.bubble_seconds == timeline.step_seconds


def test_idle_time_with_all_inputs_is_accounted_for_as_far_as_the_host_says() -> None:
    """Rank 0 of two; the gradient of B0 came at 2.8. What the host did while the rank waited for it does not count."""
    schedule = make_schedule(num_stages=2, num_microbatches=2, recompute=RecomputePolicy(sets=2, keep="none"))
    accounts = [
        OpEvent(0, Lane.COMPUTE, Op.parse("0F0"), 0.0, 1.0, 7.0, 7.0, 7.0),  # before the step
        OpEvent(0, Lane.COMPUTE, Op.parse("0F1"), 1.5, 2.5, 0.2, 0.0, 0.1),  # 0.2 of 0.5 nobody accounts for
        OpEvent(0, Lane.RECV, Op.parse("0RECV_B0"), 2.5, 2.8),
        OpEvent(0, Lane.RECOMPUTE, Op.parse("0R0"), 3.1, 4.0, 0.1, 0.4, 0.1),  # idle from 2.5 to 3.1
        OpEvent(0, Lane.COMPUTE, Op.parse("0B0"), 4.2, 5.0, 0.15, 0.0, 9.0),  # and from 4 to 4.2
    ]
    (rank,) = break_down(schedule, Timeline(1, tuple(accounts)))
    assert rank.wait_gradient_seconds == pytest.approx(0.3)
    assert rank.handover_seconds == pytest.approx(0.4 - 0.3)
    assert rank.host_seconds == pytest.approx(0.2 + 0.1 + 0.15)
    assert rank.machine_seconds == pytest.approx(0.1 + 0.3 + 0.2 - 0.1 - 0.25)
    assert rank.unexplained_seconds == pytest.approx(0.2)
    assert rank.busy_seconds + rank.bubble_seconds == pytest.approx(5.0)


def test_sets_and_bytes_over_time() -> None:
    shown = show(num_stages=2, num_microbatches=2, recompute=RecomputePolicy("overlap"))
    events = shown.timeline.of_rank(0)
    assert [count for _, count in sets_over_time(shown.schedule, events)] == [1, 0, 1, 0]
    costs = Costs(*(getattr(Costs.spread(2), name) for name in ("forward", "backward", "recompute")), (0.0,), (0.0,), (1, 1), (10, 10))  # fmt: skip
    held = [held for _, held in bytes_over_time(shown.schedule, events, costs)]
    assert held == [1, 2, 11, 1, 10, 0]  # two inputs, the first set, its end, the second, its end
    sized = show(num_stages=2, num_microbatches=2, costs=costs)
    assert sized.peak_bytes() == (11, 10)
    assert shown.peak_bytes() is None


def test_inputs_are_the_share_of_a_set_that_they_are() -> None:
    """GPipe with 3 stages and 4 microbatches: with R, stage 0 holds a set, which has its input, and three more inputs at once."""
    without = show(num_stages=3, num_microbatches=4)
    assert without.peak_sets_with_inputs() is None
    assert "peak_sets_with_inputs" not in without.as_json()
    counted = show(num_stages=3, num_microbatches=4, costs=Costs.spread(3, input_share=[0.25, 0.5, 1]))
    assert counted.peak_sets_with_inputs() == (1 + 3 * 0.25, 1 + 3 * 0.5, 1)
    assert counted.as_json()["peak_sets_with_inputs"] == [1.75, 2.5, 1]
    assert counted.step_seconds == without.step_seconds
    table = schedules_table([without, counted]).as_text()
    assert [line.split()[-1] for line in table.splitlines() if line][-2:] == ["-", "2.5"]


def test_kept_outputs_are_the_share_of_a_set_that_they_are() -> None:
    """As above, with half a set of kept outputs for each microbatch that waits for its R."""
    counted = show(num_stages=3, num_microbatches=4, costs=Costs.spread(3, kept_share=0.5))
    assert counted.peak_sets_with_inputs() == (1 + 3 * 0.5, 1 + 3 * 0.5, 1)
    both = show(num_stages=3, num_microbatches=4, costs=Costs.spread(3, kept_share=0.5, input_share=0.25))
    assert both.peak_sets_with_inputs() == (1 + 3 * 0.75, 1 + 3 * 0.75, 1)


def test_a_title_says_that_backwards_are_split() -> None:
    assert show("1f1b", num_stages=3, num_microbatches=4, split_backward=True).title.startswith(
        "1f1b, split, overlap: "
    )
    assert show("zb-h1", num_stages=3, num_microbatches=4).title.startswith("zb-h1, overlap: ")
