"""Backward split into I (the gradient of the input) and W (those of the weights): an order that says so itself, all the way."""

import dataclasses
import re

import pytest
from shows import show
from spelled import lane, ops, waits, with_words

from pipetrain.monitor.breakdown import bytes_over_time, sets_over_time
from pipetrain.monitor.draw.page import html
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.draw.terminal import staircase
from pipetrain.monitor.shown import Shown, chrome_trace
from pipetrain.schedule.alive import peak_sets, peak_stash
from pipetrain.schedule.bound import bound, bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import zero_bubble_h1
from pipetrain.schedule.kinds import Holding
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.simulate import simulate

EQUAL = {"forward": 1, "backward": 2, "recompute": 1}


def three_by_four(mode: str = "never") -> Shown:
    policy, costs = RecomputePolicy(mode, sets=3, keep="none"), Costs.spread(3, **EQUAL)  # type: ignore[arg-type]
    return show(zero_bubble_h1, num_stages=3, num_microbatches=4, recompute=policy, costs=costs)


STAIRCASES = {
    "inline": """
rank 0 F0-F1-F2-.........R0~I0<W0+F3-R1~I1<W1+R2~I2<W2+R3~I3<W3+
rank 1 ...F0-F1-...R0~I0<F2-R1~I1<W0+F3-R2~I2<W1+R3~I3<W2+W3+...
rank 2 ......F0-I0<F1-I1<...F2-I2<W0+...F3-I3<W1+W2+W3+.........
""",
    "overlap": """
rank 0 F0-F1-F2-R0~R1~I0<W0+F3-I1<W1+R2~R3~I2<W2+...I3<W3+
rank 1 ...F0-F1-R0~I0<F2-R1~I1<W0+F3-R2~I2<W1+R3~I3<W2+W3+
rank 2 ......F0-I0<F1-I1<F2-I2<W0+...F3-I3<W1+W2+W3+......
""",
}


@pytest.mark.parametrize(("mode", "picture"), [*STAIRCASES.items(), ("early", STAIRCASES["overlap"])])
def test_staircase(mode: str, picture: str) -> None:
    assert "\n" + staircase(three_by_four(mode).timeline) + "\n" == picture


def test_i_takes_and_gives_the_gradients() -> None:
    schedule = three_by_four("overlap").schedule
    assert lane(schedule, 1, Lane.SEND).endswith("1SEND_B0 1SEND_F2 1SEND_B1 1SEND_F3 1SEND_B2 1SEND_B3")
    assert lane(schedule, 1, Lane.RECV).endswith("1RECV_B0 1RECV_F2 1RECV_B1 1RECV_F3 1RECV_B2 1RECV_B3")
    assert waits(schedule, "1I2") == {"1RECV_B2", "1R2"}
    assert waits(schedule, "1SEND_B2") == {"1I2"}
    assert waits(schedule, "1W2") == set()  # behind its I on the lane


def test_a_set_is_held_to_the_end_of_w() -> None:
    ahead = make_schedule(
        zero_bubble_h1, num_stages=3, num_microbatches=6, recompute=RecomputePolicy(sets=3, keep="none")
    )
    assert waits(ahead, "1R4") == {"1F4", "1W1"}
    kept = three_by_four()
    assert [peak.sets for peak in peak_sets(kept.schedule)] == list(peak_stash(kept.schedule)) == [3, 3, 3]
    whole = make_schedule("1f1b", num_stages=3, num_microbatches=4, recompute="never")
    assert list(peak_stash(whole)) == [3, 2, 1]
    last = kept.timeline.of_rank(2)
    assert [held for _, held in sets_over_time(kept.schedule, last)] == [1, 2, 3, 2, 3, 2, 1, 0]
    sized = dataclasses.replace(kept.costs, input_bytes=(1, 1, 1), set_bytes=(10, 10, 10))
    assert max(held for _, held in bytes_over_time(kept.schedule, last, sized)) == 30


def test_the_places_of_w_that_come_out_of_order_are_free_when_they_are() -> None:
    policy = RecomputePolicy(sets=2, keep="none", last_stage="always")  # type: ignore[arg-type]
    words = ops("0F0 0F1 0F2 0F3 0I0 0I1 0W1 0W0 0I2 0W2 0I3 0W3")
    schedule = make_schedule(lambda _: [words], num_stages=1, num_microbatches=4, recompute=policy)
    assert [waits(schedule, f"0R{i}") for i in (2, 3)] == [{"0F2", "0W1"}, {"0F3", "0W0"}]
    check(schedule)


def test_a_place_too_few_is_named() -> None:
    with pytest.raises(ScheduleError, match="1R1: stage 1 can have 2 sets alive at once, but only 1 activation slot"):
        check(make_schedule(zero_bubble_h1, num_stages=3, num_microbatches=4, recompute="overlap"))


def test_breakdown() -> None:
    """I waits for its gradient as B does; W fills the wait for the next."""
    first, middle, last = three_by_four().breakdown
    assert [rank.wait_gradient_seconds for rank in (first, middle, last)] == [2, 1, 0]
    assert [rank.drain_seconds for rank in (first, middle, last)] == [0, 0, 0]
    assert {rank.unexplained_seconds for rank in (first, middle, last)} == {0}
    assert {rank.deferred_share for rank in (first, middle, last)} == {0.5}
    assert [rank.recompute_hidden_seconds for rank in three_by_four("overlap").breakdown] == [4, 1, 0]
    assert [rank.recompute_exposed_seconds for rank in three_by_four("overlap").breakdown] == [0, 3, 0]


def test_costs_of_the_halves() -> None:
    halves = Costs.spread(2, backward=[2, 4])
    assert (halves.of(Kind.I), halves.of(Kind.W)) == ((1, 2), (1, 2))
    given = Costs.spread(2, input_gradient=0.5, weight_gradient=[1, 3])
    assert (given.of(Kind.I), given.of(Kind.W)) == ((0.5, 0.5), (1, 3))
    with pytest.raises(ValueError, match=r"cost\.weight_gradient_seconds has 3 numbers"):
        Costs.spread(2, weight_gradient=[1, 2, 3])


def test_bound() -> None:
    """The work of a stage may end after its last I, but for the W whose places are taken."""
    costs, unequal = Costs.spread(3, **EQUAL), Costs.spread(3, **EQUAL, input_gradient=1, weight_gradient=3)
    shown = three_by_four()
    assert shown.bound_seconds == shown.step_seconds == 2 + 4 * 3  # no rank stands idle after its start
    assert bound(costs, 4, policy="never", split_backward=True) == 14
    assert bound(costs, 4, policy="never") == (4 + 2) * 3
    # One place: of the last stage's W only the last may follow its last I, which still has to go back to stage 0.
    one = RecomputePolicy("inline", last_stage="always")  # type: ignore[arg-type]
    assert bound(unequal, 4, policy=one, split_backward=True) == 2 + 4 * (1 + 1 + 1) + 3 * 3 + 2 + 3
    schedule = make_schedule(zero_bubble_h1, num_stages=3, num_microbatches=4, recompute="never")
    assert bound_of(schedule, unequal) == 2 + 4 * 5 <= simulate(schedule, unequal).step_seconds


def test_drawings_show_both_halves() -> None:
    shown = three_by_four("inline")
    assert {"I2", "W2"} <= set(re.findall(r">([A-Z]\d)<", svg(shown)))
    assert all(
        str(Op(1, kind, 3)) in html(shown) and str(Op(1, kind, 3)) in chrome_trace(shown.timeline)
        for kind in (Kind.I, Kind.W)
    )


SOUND = make_schedule(zero_bubble_h1, num_stages=3, num_microbatches=4, recompute="never")
COMPUTE = lane(SOUND, 1, Lane.COMPUTE)
BROKEN = {
    "w without i": (("1I2", ""), "1I2: is missing: 1W2 needs it"),
    "i without w": (("1W2", ""), "1W2: is missing: 1I2 needs it"),
    "both": (
        ("1I2", "1I2 1B2"),
        "1B2: is extra to 1I2 and 1W2: each microbatch needs exactly one backward: B, B of each part, or I and W",
    ),
    "w first": (("1I2 1W1 1I3 1W2", "1W2 1W1 1I3 1I2"), "1W2: does not wait for 1I2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_what_is_wrong(name: str) -> None:
    (old, new), message = BROKEN[name]
    assert old in COMPUTE
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(with_words(SOUND, 1, COMPUTE.replace(old, new), lane=Lane.COMPUTE))


def test_whole_and_split_microbatches_may_be_neighbours() -> None:
    lanes = [ops("0F0 0F1 0B0 0I1 0W1"), ops("1F0 1I0 1W0 1F1 1B1")]
    shown = show(lambda _: lanes, num_stages=2, num_microbatches=2)
    assert shown.step_seconds >= shown.bound_seconds
    assert waits(shown.schedule, "0SEND_F1") == {"0F1"}


def test_neighbours_on_one_rank_hand_the_gradient_from_i() -> None:
    words = ops("0F0 1F0 1I0 0B0 1W0")
    schedule = make_schedule(lambda _: [words], num_stages=2, num_ranks=1, num_microbatches=1, recompute="never")
    check(schedule)
    assert waits(schedule, "0B0") == {"1I0"}


def test_what_w_closes_is_what_b_closes() -> None:
    assert Kind.W.row.frees == Kind.B.row.frees == frozenset(Holding) - {Holding.HOST_SET}
    assert not Kind.I.row.frees
