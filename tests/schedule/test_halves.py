"""Backward in halves, I (the gradient of the input) and W (those of the weights): where the pass puts them, and an order that says so itself."""

import dataclasses
import re
from typing import Any

import pytest
from examples import examples
from random_schedules import Case, cases
from shows import show
from spelled import in_order, lane, ops, waits

from pipetrain.monitor.breakdown import bytes_over_time, sets_over_time
from pipetrain.monitor.draw.page import html
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.draw.terminal import staircase
from pipetrain.monitor.shown import Shown, chrome_trace
from pipetrain.schedule.alive import peak_sets, peak_stash
from pipetrain.schedule.bound import bound, bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import ALWAYS_SPLIT, zero_bubble_h1
from pipetrain.schedule.kinds import Holding
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.simulate import simulate

THIRDS = {"forward": 1, "backward": 2, "recompute": 1}


def halved(family: str, stages: int, microbatches: int, policy: str | RecomputePolicy = "never", **more: Any) -> Shown:
    costs = Costs.spread(stages, **THIRDS)
    numbers = {"num_stages": stages, "num_microbatches": microbatches, "costs": costs, "split_backward": True}
    return show(family, **{**numbers, **more}, recompute=policy)


STAIRCASES = {
    ("gpipe", "never", 1): """
rank 0 F0-F1-F2-F3-......I0<I1<W0+I2<W1+I3<W2+W3+
rank 1 ...F0-F1-F2-F3-I0<I1<W0+I2<W1+I3<W2+W3+...
rank 2 ......F0-I0<F1-I1<F2-I2<F3-I3<W0+W1+W2+W3+
""",
    ("1f1b", "inline", 1): """
rank 0 F0-F1-F2-.........R0~I0<W0+F3-R1~I1<W1+...R2~I2<W2+R3~I3<W3+
rank 1 ...F0-F1-...R0~I0<W0+F2-R1~I1<W1+F3-R2~I2<W2+R3~I3<W3+......
rank 2 ......F0-I0<W0+F1-I1<W1+F2-I2<W2+...F3-I3<W3+...............
""",
    ("1f1b", "overlap", 1): """
rank 0 F0-F1-F2-R0~...I0<W0+F3-R1~I1<W1+R2~...I2<W2+R3~I3<W3+
rank 1 ...F0-F1-R0~I0<W0+F2-R1~I1<W1+F3-R2~I2<W2+R3~I3<W3+...
rank 2 ......F0-I0<W0+F1-I1<W1+F2-I2<W2+F3-I3<W3+............
""",
    ("1f1b", "overlap", 2): """
rank 0 F0-F1-F2-......I0<W0+F3-I1<W1+R2~I2<W2+I3<W3+
rank 1 ...F0-F1-...I0<W0+F2-I1<W1+F3-I2<W2+I3<W3+...
rank 2 ......F0-I0<F1-I1<W0+F2-I2<W1+F3-I3<W2+W3+...
""",
}


@pytest.mark.parametrize("case", STAIRCASES, ids=lambda case: "-".join(map(str, case)))
def test_staircase(case: tuple[str, str, int]) -> None:
    family, mode, sets = case
    shown = halved(family, 3, 4, RecomputePolicy(mode, sets=sets))  # type: ignore[arg-type]
    assert "\n" + staircase(shown.timeline) + "\n" == STAIRCASES[case]


def test_early_has_the_gaps_of_overlap() -> None:
    early, overlap = (
        halved("1f1b", 3, 4, RecomputePolicy(mode, sets=2)).timeline for mode in (Mode.EARLY, Mode.OVERLAP)
    )
    assert staircase(early) == staircase(overlap)


# p, m, K and the step in units of f: whole, in halves
FIGURES = [
    ("1f1b", 8, 16, "never", 1, 69, 55),
    ("1f1b", 8, 8, "overlap", 2, 47, 39),
    ("1f1b", 4, 16, "overlap", 1, 71, 68),
    ("gpipe", 4, 16, "overlap", 1, 70, 68),
    ("gpipe", 4, 8, "inline", 1, 40, 38),
]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: "-".join(map(str, figure[:5])))
def test_figures(figure: tuple[str, int, int, str, int, float, float]) -> None:
    family, stages, microbatches, mode, sets, whole, in_halves = figure
    policy = RecomputePolicy(mode, sets=sets)  # type: ignore[arg-type]
    assert halved(family, stages, microbatches, policy, split_backward=False).step_seconds == whole
    assert halved(family, stages, microbatches, policy).step_seconds == in_halves


def test_without_recomputation_no_stage_holds_more_than_the_one_that_has_most() -> None:
    """Put off to the end, W would hold all eight microbatches of the last stage."""
    for family, most in (("1f1b", 4), ("gpipe", 8)):
        whole = make_schedule(family, num_stages=4, num_microbatches=8, recompute="never")
        shown = halved(family, 4, 8)
        assert max(peak_stash(whole)) == max(peak_stash(shown.schedule)) == most
    assert halved("1f1b", 4, 8).step_seconds == 8 * 3 + 3  # what ZB-H1 takes
    less = halved("1f1b", 4, 8, RecomputePolicy(Mode.NEVER, stash=(4, 3, 2, 2)))
    assert peak_stash(less.schedule) == (4, 3, 2, 2)
    assert less.step_seconds > 27


def test_unequal_costs_move_w() -> None:
    """A slow stage has no waits: its W stay where they are as long as others wait for it."""
    costs = Costs.spread(3, forward=[1, 1, 2], backward=[2, 2, 4])
    shown = halved("1f1b", 3, 6, costs=costs)
    assert shown.step_seconds < halved("1f1b", 3, 6, costs=costs, split_backward=False).step_seconds
    assert shown.step_seconds == shown.bound_seconds


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", Mode)
def test_several_stages_per_rank(mode: Mode, ranks: int) -> None:
    for family, placement in (("interleaved", "loop"), ("gpipe", "v"), ("gpipe", "loop")):
        more = {"num_ranks": ranks, "placement": placement}
        whole = halved(family, 4, 6, RecomputePolicy(mode), split_backward=False, **more)
        assert halved(family, 4, 6, RecomputePolicy(mode), **more).step_seconds <= whole.step_seconds


def test_forwards_only_have_nothing_to_split() -> None:
    forwards = make_schedule("inference", num_stages=3, num_microbatches=4, split_backward=True)
    assert not {op.kind for _, _, op in forwards.ops()} & {Kind.B, Kind.I, Kind.W}


@examples(12, 100, cases(with_parts=False))
def test_halves_run_in_microbatch_order_within_their_bounds(case: Case) -> None:
    arguments = {**case.arguments, "split_backward": True}
    if callable(arguments["family"]):
        return
    schedule = dataclasses.replace(case, arguments=arguments).make()
    check(schedule)
    assert all(in_order(schedule, kind) for kind in (Kind.I, Kind.W))
    kinds = {op.kind for _, _, op in schedule.ops()}
    assert Kind.B not in kinds
    if schedule.policy.mode is Mode.NEVER and arguments["family"] not in ALWAYS_SPLIT:
        whole = dataclasses.replace(case, arguments={**arguments, "split_backward": False}).make()
        assert max(peak_stash(schedule)) == max(peak_stash(whole))


@examples(40, 100, cases(with_split=False, with_parts=False))
def test_halves_of_a_whole_are_never_slower_without_recomputation(case: Case) -> None:
    """Each W behind its I is one of the orders to choose from, and there the gradient only goes on earlier."""
    arguments = {**case.arguments, "recompute": RecomputePolicy(Mode.NEVER)}
    costs = dataclasses.replace(case.costs, input_gradient=(), weight_gradient=())
    whole = make_schedule(**arguments, costs=costs)
    halves = make_schedule(**arguments, costs=costs, split_backward=True)
    rounding = 1e-9 * (1 + simulate(whole, costs).step_seconds)
    assert simulate(halves, costs).step_seconds <= simulate(whole, costs).step_seconds + rounding


def test_a_w_between_an_inline_r_and_its_i() -> None:
    """Received just in time, a gradient is for the R that waits for it, and the W in between is none of its users."""
    lanes = [ops("0F0 0F1 0R0 0I0 0R1 0W0 0I1 0W1"), ops("1F0 1I0 1W0 1F1 1I1 1W1")]
    policy = RecomputePolicy(Mode.INLINE, sets=2)
    schedule = make_schedule(lambda _: lanes, num_stages=2, num_microbatches=2, recompute=policy, transport_ahead=0)
    assert schedule.lane(0, Lane.COMPUTE) == lanes[0]
    check(schedule)
    assert simulate(schedule, Costs.spread(2)).step_seconds > 0


# An order that says itself where they are ------------------------------------------------------------------------------


def three_by_four(mode: str = "never") -> Shown:
    policy, costs = RecomputePolicy(mode, sets=3, keep="none"), Costs.spread(3, **THIRDS)  # type: ignore[arg-type]
    return show(zero_bubble_h1, num_stages=3, num_microbatches=4, recompute=policy, costs=costs)


PICTURES = {
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


@pytest.mark.parametrize(("mode", "picture"), [*PICTURES.items(), ("early", PICTURES["overlap"])])
def test_staircase_of_an_order_of_ones_own(mode: str, picture: str) -> None:
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
    costs, unequal = Costs.spread(3, **THIRDS), Costs.spread(3, **THIRDS, input_gradient=1, weight_gradient=3)
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
