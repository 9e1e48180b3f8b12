"""Stages that share a parameter add up its gradients: which ops, when, proved, and what they cost."""

from __future__ import annotations

import pytest
from spelled import lane, reduces, with_words

from pipetrain.monitor.breakdown import break_down
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.shown import show_schedule
from pipetrain.plan.plan import make_plan
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv, write_csv
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule, with_first_backward
from pipetrain.schedule.op import Lane
from pipetrain.schedule.reduce import with_reduces
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.simulate import simulate


def four(family: str = "1f1b", **options: object) -> Schedule:
    return make_schedule(family, num_stages=4, num_microbatches=3, **{"tied": [(0, 3)], **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("gpipe", {}, [["0REDUCE_GRAD.0>3 <- 0B2"], [], [], ["3REDUCE_GRAD.0>0 <- 3B2"]]),
        ("1f1b", {"recompute": "inline"}, [["0REDUCE_GRAD.0>3 <- 0B2"], [], [], ["3REDUCE_GRAD.0>0 <- 3B2"]]),
        ("zb-h1", {}, [["0REDUCE_GRAD.0>3 <- 0W2"], [], [], ["3REDUCE_GRAD.0>0 <- 3W2"]]),
        ("auto", {}, [["0REDUCE_GRAD.0>3 <- 0B2"], [], [], ["3REDUCE_GRAD.0>0 <- 3B2"]]),
        ("interleaved", {"num_ranks": 2}, [["0REDUCE_GRAD.0>3 <- 0B2"], ["3REDUCE_GRAD.0>0 <- 3B2"]]),
        ("zbv", {"num_ranks": 2, "placement": "v"}, [[], []]),
        ("gpipe", {"num_ranks": 2, "placement": "v"}, [[], []]),
        ("gpipe", {"first_backward": 1}, [[], [], [], []]),
        (
            "1f1b",
            {"tied": [(1, 2), (0, 3), (0, 1)]},
            [
                ["0REDUCE_GRAD.1>3 <- 0B2", "0REDUCE_GRAD.2>1 <- 0B2"],
                ["1REDUCE_GRAD.0>2 <- 1B2", "1REDUCE_GRAD.2>0 <- 1B2"],
                ["2REDUCE_GRAD.0>1 <- 2B2"],
                ["3REDUCE_GRAD.1>0 <- 3B2"],
            ],
        ),
    ],
    ids=str,
)
def test_which_ops_and_what_they_wait_for(family: str, options: dict[str, object], expected: list[list[str]]) -> None:
    schedule = four(family, **options)
    check(schedule)
    assert reduces(schedule) == expected
    launched = for_device(schedule)
    check(launched)
    assert reduces(launched) == expected


def test_pairs_of_layers_become_pairs_of_stages() -> None:
    plan = make_plan(6, num_ranks=3, balance=[2, 3, 1])
    assert plan.tied_stages([(5, 0), (1, 5), (0, 1), (2, 5)]) == ((1, 2), (0, 2))


def test_the_rest_of_a_schedule_stays_as_it_is() -> None:
    """Whoever knows nothing of a model makes a schedule; its ties come later."""
    made = four(tied=())
    assert with_reduces(made, ()) is made
    assert with_reduces(for_device(made), ((0, 3),)).lanes == with_reduces(made, ((0, 3),)).lanes == four().lanes
    assert with_reduces(made, ((0, 3),)) == four()
    assert all(four().waits[op] == awaited for op, awaited in made.waits.items())


def test_frozen_stages() -> None:
    assert reduces(with_first_backward(four(), 1)) == [[], [], [], []]


BROKEN = {
    "left out": (with_words(four(), 0, "", {"0REDUCE_GRAD.0>3": ""}), "0REDUCE_GRAD.0>3: is missing"),
    "twice": (with_words(four(), 0, "0REDUCE_GRAD.0>3 0REDUCE_GRAD.0>3"), "0REDUCE_GRAD.0>3: stands there 2 times"),
    "unasked": (with_words(four(), 1, "1REDUCE_GRAD.1>2"), "1REDUCE_GRAD.1>2: reduces a parameter that no two stages share"),
    "with itself": (with_words(four(), 1, "1REDUCE_GRAD.0>1"), "1REDUCE_GRAD.0>1: reduces a parameter that no two stages share"),
    "no bucket": (with_words(four(), 1, "1REDUCE_GRAD>2"), "1REDUCE_GRAD>2: is spelled without a bucket"),
    "other rank": (with_words(four(), 1, "0REDUCE_GRAD.0>3"), "0REDUCE_GRAD.0>3: stands there 2 times"),
    "other lane": (
        with_words(with_words(four(), 0, "", lane=Lane.SEND), 0, lane(four(), 0, Lane.SEND)),
        "0SEND_F0: SEND_F belongs into the send lane, not into reduce",
    ),
    "too early": (with_words(four(), 0, "0REDUCE_GRAD.0>3", {"0REDUCE_GRAD.0>3": "0B1"}), "does not wait for 0B2"),
    "other order of two ranks": (
        with_words(four("gpipe", num_ranks=2, tied=[(0, 3), (0, 1)]), 1, "1REDUCE_GRAD.1>0 3REDUCE_GRAD.0>0"),
        "0REDUCE_GRAD.0>3: meets 1REDUCE_GRAD.1>0",
    ),
    "a backward waits for the sum": (with_words(four(), 3, "3REDUCE_GRAD.0>0", {"3B2": "3RECV_F2 3REDUCE_GRAD.0>0"}), "waits for"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(name: str) -> None:
    schedule, message = BROKEN[name]
    with pytest.raises(ScheduleError, match=message.replace(".", r"\.").replace("(", r"\(")):
        check(schedule)


def test_ranks_that_wait_for_each_other_in_a_ring() -> None:
    """No two of the three ranks meet in two orders, and yet each waits for the next."""
    ring = make_schedule("gpipe", num_stages=3, num_microbatches=2, tied=[(1, 2), (0, 2), (0, 1)])
    check(ring)
    first = with_words(ring, 0, "0REDUCE_GRAD.1>2 0REDUCE_GRAD.2>1")
    second = with_words(first, 1, "1REDUCE_GRAD.2>0 1REDUCE_GRAD.0>2")
    check(with_words(second, 2, "2REDUCE_GRAD.1>0 2REDUCE_GRAD.0>1"))
    with pytest.raises(ScheduleError, match=r"There is no deadlock.*\n.*REDUCE_GRAD.*which waits for"):
        check(with_words(second, 2, "2REDUCE_GRAD.0>1 2REDUCE_GRAD.1>0"))


def test_what_it_costs() -> None:
    """The last stage is done earlier, and its end of the sum lies under the other stages' way back; the rest comes at the end."""
    costs = Costs.spread(4, reduce=[2, 0, 0, 5])
    shared, alone = (simulate(four("gpipe", tied=tied, recompute="never"), costs) for tied in ([(0, 3)], []))
    assert alone.step_seconds == 18
    assert shared.step_seconds == 18 + 5 == bound_of(four("gpipe", recompute="never"), costs)
    events = {str(event.op): (event.start, event.end) for event in shared.events if event.lane is Lane.REDUCE}
    assert events == {"0REDUCE_GRAD.0>3": (18, 23), "3REDUCE_GRAD.0>0": (12, 23)}
    for rank in break_down(four("gpipe", recompute="never"), shared):
        assert rank.busy_seconds + rank.bubble_seconds == 23
    in_between = four("gpipe", tied=[(1, 2)], recompute="never")
    assert simulate(in_between, Costs.spread(4, reduce=1)).step_seconds == 18  # hidden under the way back of stage 0
    assert simulate(in_between, Costs.spread(4, reduce=5)).step_seconds == 16 + 5
    assert bound_of(in_between, Costs.spread(4, reduce=5)) <= 21


def test_it_is_drawn_at_the_foot_of_its_rank() -> None:
    picture = svg(show_schedule(four("gpipe"), Costs.spread(4, reduce=5)))
    lines = [line for line in picture.splitlines() if 'class="reduce"' in line]
    assert ["0REDUCE_GRAD.0>3" in lines[0], "3REDUCE_GRAD.0>0" in lines[1], len(lines)] == [True, True, 2]
    assert "REDUCE_GRAD gradients added up" in picture
    assert 'class="reduce"' not in svg(show_schedule(four("gpipe", tied=())))


def test_what_a_file_holds_and_what_the_model_says() -> None:
    """A file has the compute lane: its ties, as its messages, are made when it is read."""
    text = write_csv(four())
    assert "REDUCE" not in text
    order = order_of_csv(text, "a file", ScheduleSpec("1f1b", (0, 1, 2, 3), 3).shape)
    read = make_schedule(lambda _: order, num_stages=4, num_microbatches=3, tied=[(0, 3)])
    assert read.lanes == four().lanes
