"""Closed forms, the bound, and what the simulator's links and lanes do."""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from shows import show

from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.bound import bound, bound_of
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Keep, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

SIZES = [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 4, 9, 17)]
TIMES = [
    (1.0, 2.0, 1.0, 0.0),
    (1.0, 2.0, 1.0, 1.0),
    (0.37, 0.91, 0.4, 0.11),
    (0.1, 0.3, 0.2, 0.1),
    (1.0, 1.0, 0.0, 0.5),
]


def step(stages: int, microbatches: int, policy: str | RecomputePolicy, costs: Costs, family: str = "gpipe") -> float:
    schedule = make_schedule(family, num_stages=stages, num_microbatches=microbatches, recompute=policy, costs=costs)
    return simulate(schedule, costs).step_seconds


@pytest.mark.parametrize(("f", "b", "r", "c"), TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_closed_forms_with_r_on_every_stage(p: int, m: int, f: float, b: float, r: float, c: float) -> None:
    costs = Costs.spread(p, forward=f, backward=b, recompute=r, hop=c)
    expected = {
        Mode.NEVER: (m + p - 1) * (f + b),
        Mode.INLINE: (m + p - 1) * (f + b + r),
        Mode.EARLY: (m + p - 1) * (f + b) + m * r,
    }
    for mode, seconds in expected.items():
        measured = step(p, m, RecomputePolicy(mode, last_stage="always"), costs)
        assert measured == pytest.approx(seconds + 2 * (p - 1) * c, abs=1e-9)


@pytest.mark.parametrize(("f", "b", "r"), [(1.0, 2.0, 1.0), (0.37, 0.91, 0.4), (0.1, 0.3, 0.2)])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if p >= 2 and m >= 4])
def test_closed_forms_with_a_last_stage_that_alternates(p: int, m: int, f: float, b: float, r: float) -> None:
    costs = Costs.spread(p, forward=f, backward=b, recompute=r)
    expected = max((m + p - 1) * (f + b), (m + p - 2) * (f + b) + m * r)
    assert (m - 2) * f + r >= b
    for mode in ("early", "overlap"):
        assert step(p, m, mode, costs) == pytest.approx(expected, abs=1e-9)
        assert bound(costs, m, policy=mode) == pytest.approx(expected, abs=1e-9)
    equal = Costs.spread(p, forward=f, backward=f + r, recompute=r)
    if r <= (m - 3) * f:  # else the first gradient comes later than the last F
        assert step(p, m, "inline", equal) == pytest.approx((m + p - 2) * (2 * f + 2 * r), abs=1e-9)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_bubble_of_interleaving(p: int, v: int, rounds: int) -> None:
    f, b, m = 1.1, 2.3, rounds * p
    costs = Costs.spread(p * v, forward=f / v, backward=b / v)
    schedule = make_schedule("interleaved", num_stages=p * v, num_ranks=p, num_microbatches=m, recompute="never")
    assert simulate(schedule, costs).step_seconds == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v, abs=1e-9)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (3, 3, 7), (2, 2, 5)])
def test_sets_of_interleaving(p: int, v: int, m: int) -> None:
    shown = show("interleaved", num_stages=p * v, num_ranks=p, num_microbatches=m, recompute="never")
    for rank in shown.breakdown:
        assert rank.peak_sets <= 2 * (p - rank.rank - 1) + (v - 1) * p + 1


def test_one_recomputed_set_alive_is_enough() -> None:
    costs = Costs.spread(4)
    times = {sets: step(4, 8, RecomputePolicy(sets=sets, keep="none"), costs) for sets in (1, 2, 4)}
    assert set(times.values()) == {38.0}


def test_a_faster_order_than_inline_at_two_stages_is_the_order_alone() -> None:
    costs = Costs.spread(2)
    assert step(2, 8, "inline", costs) == step(2, 8, "overlap", costs) == 32


@pytest.mark.parametrize("hops", [0.0, 0.5, 2.0, [0.0, 0.0, 2.0], [2.0, 0.0, 0.0]], ids=str)
@pytest.mark.parametrize("mode", ["never", "overlap"])
def test_1f1b_with_the_best_warmup_is_no_slower_than_gpipe(hops: float | list[float], mode: str) -> None:
    """Within each bound on the microbatches stashed per stage: gpipe needs m of them, 1f1b as few as stages."""
    p, m, costs = 4, 8, Costs.spread(4, hop=hops)
    gpipe = make_schedule(num_stages=p, num_microbatches=m, recompute=RecomputePolicy(mode, stash=m))
    check(gpipe)
    with pytest.raises(ValueError, match="No stage holds more"):
        check(dataclasses.replace(gpipe, policy=RecomputePolicy(mode, stash=m - 1)))
    best: dict[int, float] = {}
    for warmup in range(p, (m - 1) * (p - 1) + 2):
        schedule = make_schedule("1f1b", num_stages=p, num_microbatches=m, recompute=mode, warmup=warmup)
        stash = max(peak_stash(schedule))
        assert stash == min(m, warmup)
        best[stash] = min(best.get(stash, math.inf), simulate(schedule, costs).step_seconds)
    assert min(best.values()) <= simulate(gpipe, costs).step_seconds + 1e-9


@pytest.mark.parametrize("hop", [0.25, 0.5, 1.0])
def test_more_forwards_in_flight_cover_slow_hops(hop: float) -> None:
    costs = Costs.spread(4, hop=hop)
    classic, more = (
        show("1f1b", num_stages=4, num_microbatches=16, recompute="never", warmup=w, costs=costs).step_seconds
        for w in (4, 7)
    )
    assert more == pytest.approx((16 + 3) * 3 + 2 * 3 * hop)
    assert more < classic


def test_a_slow_link_delays_every_microbatch() -> None:
    costs = Costs.spread(2, forward=1, backward=1, hop=[3.0])
    assert step(2, 4, "never", costs) == 1 + 4 * 3 + 1 + 1 + 3 + 1  # F0, four tensors one by one, F3, B3, back, B3
    assert bound(costs, 4, policy="never") == step(2, 4, "never", costs)


def test_receives_just_in_time_pay_the_hop_on_every_microbatch() -> None:
    costs = Costs.spread(3, hop=0.5)
    wanted = {"num_stages": 3, "num_microbatches": 8, "recompute": "never"}
    ahead, late = (simulate(make_schedule(**wanted, transport_ahead=n), costs).step_seconds for n in (2, 0))
    assert ahead == (8 + 2) * 3 + 2 * 2 * 0.5
    assert late >= ahead + 7 * 0.5


def test_bound_of_unequal_stages_and_frozen_ones() -> None:
    costs = Costs.spread(3, forward=[1, 2, 1], backward=[2, 5, 2], recompute=[1, 2, 1], hop=[0.5, 0.25])
    assert bound(costs, 4) == (1 + 0.5) + 4 * (2 + 5 + 2) + (2 + 0.5)  # all work of stage 1 between head and tail
    assert bound(costs, 4, first_backward=3) == (1 + 0.5) + 4 * 2 + (0.25 + 1)
    assert bound_of(make_schedule(num_stages=3, num_microbatches=4), costs) == bound(costs, 4)


def test_keeping_all_sets_is_bounded_by_the_work_alone() -> None:
    costs = Costs.spread(4)
    assert bound(costs, 8, policy=RecomputePolicy(sets=8)) == 33
    assert bound(costs, 16, policy=RecomputePolicy(sets=2)) == 57 < bound(costs, 16) == 70


@pytest.mark.parametrize(("p", "m", "least"), [(2, 8, 30), (4, 4, 21), (4, 8, 36), (4, 16, 66), (8, 8, 48)])
def test_place_time_bounds_one_place_where_the_best_order_is_known(p: int, m: int, least: float) -> None:
    """Of these orders the best was found by two models of constraint programming; the bound proves that it is."""
    assert bound(Costs.spread(p), m, policy=RecomputePolicy(keep=Keep.AUTO)) == least


def test_the_lives_of_kept_sets_lie_one_after_the_other() -> None:
    """One place. A set of stage 0 lives 2 + 1 + 2 + 2 s where it is kept, 4 + 2 s from its R; F and B take 4 s, an R 4 s more."""
    costs = Costs.spread(2, forward=[2, 1], backward=2, recompute=4)
    policy = RecomputePolicy("inline", keep=Keep.AUTO, last_stage="always")  # type: ignore[arg-type]
    by_kept = [max(7 * kept + 6 * (4 - kept), 16 + 4 * (4 - kept)) for kept in range(5)]
    assert bound(costs, 4, policy=policy) == min(by_kept) == by_kept[2] == 26
    alone = RecomputePolicy("inline", keep=Keep.NONE, last_stage="always")  # type: ignore[arg-type]
    assert bound(costs, 4, policy=alone) == 16 + 4 * 4


def test_simulation_is_deterministic() -> None:
    costs = Costs.spread(5, forward=[0.1, 0.2, 0.3, 0.2, 0.1], hop=0.05)
    first, second = (simulate(make_schedule("1f1b", num_stages=5, num_microbatches=9), costs) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
def test_rounding_does_not_change_who_goes_first(family: str) -> None:
    """In tenths 0.1 + 0.2 is not 0.3: an arrival in the last digit too late must not let an R in before its B."""
    for forward, backward, recompute, hop in itertools.product((1, 3), (2, 3, 7), (1, 2, 6), (0, 1)):
        whole = Costs.spread(4, forward=forward, backward=backward, recompute=recompute, hop=hop)
        parts = (forward / 10, backward / 10, recompute / 10, hop / 10)
        tenths = Costs.spread(4, forward=parts[0], backward=parts[1], recompute=parts[2], hop=parts[3])
        schedule = make_schedule(family, num_stages=4, num_microbatches=8)
        exact = simulate(schedule, whole).step_seconds / 10
        assert simulate(schedule, tenths).step_seconds == pytest.approx(exact, abs=1e-9)


def test_wrong_number_of_costs() -> None:
    with pytest.raises(ValueError, match="costs are for 3 stages, the schedule has 2"):
        simulate(make_schedule(num_stages=2, num_microbatches=1), Costs.spread(3))


def test_a_deadlock_says_who_waits_for_what() -> None:
    schedule = make_schedule(num_stages=3, num_microbatches=2, recompute="never")
    waits = {**schedule.waits, Op.parse("2F0"): (*schedule.waits[Op.parse("2F0")], Op.parse("0B0"))}
    stuck = Schedule(**{**vars(schedule), "waits": waits})
    with pytest.raises(ValueError, match="comes to a stop") as error:
        simulate(stuck, Costs.spread(3))
    assert "0B0, which waits for 0RECV_B0, which waits for 1SEND_B0, which" in str(error.value)
    assert "2B0, which waits for 2F0, which cannot run" in str(error.value)


def calls_per_op(function: Callable[[Schedule], Any], stages: int, microbatches: int) -> float:
    """Calls, those of builtins too, that `function` makes per op of all lanes. Seconds would be those of the machine."""
    schedule = make_schedule(num_stages=stages, num_microbatches=microbatches)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(schedule)
    finally:
        sys.setprofile(before)
    return calls / sum(1 for _ in schedule.ops())


@pytest.mark.parametrize("function", [check, lambda schedule: simulate(schedule, Costs.spread(schedule.num_stages))])
def test_work_grows_with_the_ops(function: Callable[[Schedule], Any]) -> None:
    """Of a check and of a simulation. Their seconds are measured by `pipetrain bench cost`."""
    assert calls_per_op(function, 16, 128) < 1.05 * calls_per_op(function, 4, 16)
