"""Plans for a memory budget: more budget is never slower, little is lost against a search of all plans, and the keys are those of a run."""

import dataclasses
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from random_plans import IN_SPACE, every_plan, layer, random_problem, random_profile

from pipetrain.plan import planner
from pipetrain.plan.balance import balance_by_step, balance_evenly
from pipetrain.plan.footprint import Footprint, Holdings, RankMemory
from pipetrain.plan.planner import Plans, frontier, make_plans
from pipetrain.plan.profile import LOSS, Link, Profile
from pipetrain.plan.space import PlanProblem, layouts_of, lean_balance
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.make import make
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.simulate import simulate

_SOME = ["0", "1", "2"]


def budgets_of(plans: Plans) -> list[int]:
    return sorted({one.peak_bytes for one in plans.plans})


def least_seconds(plans: Plans, budget: float) -> float:
    return min((one.step_seconds for one in plans.within(budget)), default=math.inf)


# Monotone -------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(*_SOME)
@pytest.mark.parametrize("seed", range(20), ids=str)
def test_more_budget_is_never_slower_nor_refused(seed: int, tmp_path: Path) -> None:
    """With the search, whose orders count as well."""
    plans = make_plans(random_problem(seed), search_seconds=1.0, cache=tmp_path)
    budgets = budgets_of(plans)
    assert plans.within(budgets[0] - 1) == []
    seconds = [plans.within(budget)[0].step_seconds for budget in (*budgets, math.inf)]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one.peak_bytes <= budget for budget in budgets for one in plans.within(budget))


def test_plans_do_not_depend_on_the_clock(tmp_path: Path) -> None:
    first, second = (make_plans(random_problem(5), search_seconds=1.0, cache=tmp_path / name) for name in "ab")
    assert [one.as_json() for one in first.plans] == [one.as_json() for one in second.plans]


def test_the_frontier_has_what_nothing_beats() -> None:
    priced = [(3.0, 10), (2.0, 20), (2.0, 30), (1.0, 40), (3.0, 10), (4.0, 9)]
    plans = [SimpleNamespace(step_seconds=seconds, peak_bytes=size) for seconds, size in priced]
    assert frontier(plans) == [plans[5], plans[0], plans[1], plans[3]]  # type: ignore[arg-type]


# Good -----------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(*_SOME)
@pytest.mark.parametrize("seed", range(15), ids=str)
def test_the_plan_is_near_the_best_of_all(seed: int) -> None:
    """For each of four budgets, against every balance, number of slots per stage and rule."""
    problem = random_problem(seed)
    plans = make_plans(dataclasses.replace(problem, held={**problem.held, **IN_SPACE}))
    every = list(every_plan(problem))
    peaks = sorted(peak for _, peak in every)
    for share in (0.0, 0.1, 0.3, 1.0):
        budget = peaks[int(share * (len(peaks) - 1))]
        best = min(seconds for seconds, peak in every if peak <= budget)
        assert least_seconds(plans, budget) <= 1.02 * best, f"budget {budget}"


@pytest.mark.quick(*_SOME)
@pytest.mark.parametrize("seed", range(10), ids=str)
def test_the_plan_is_no_slower_than_equal_layers_nor_than_balance_auto(seed: int) -> None:
    problem = random_problem(1000 + seed)
    plans, layers, ranks = make_plans(problem), problem.profile.num_layers, problem.num_ranks
    even = balance_evenly(layers, ranks)
    spec = ScheduleSpec("1f1b", tuple(range(ranks)), problem.num_microbatches, RecomputePolicy())
    lean = balance_by_step(even, spec, lambda balance: costs_of_layers(problem.profile, balance))
    for balance in {even, lean}:
        held = make_plans(dataclasses.replace(problem, held={**problem.held, "pipeline.balance": balance}))
        for budget in budgets_of(held):
            assert least_seconds(plans, budget) <= least_seconds(held, budget) * 1.0001, balance


def test_what_is_near_the_frontier_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layers on four stages have more balances than are tried to begin with."""
    held = {"parallel.num_replicas": 1, "pipeline.num_microbatches": 8, **IN_SPACE}
    problem = PlanProblem(random_profile(random.Random(1), 10), 8, 4, num_microbatches=8, held=held)
    plans = make_plans(problem)
    monkeypatch.setattr(planner, "neighbours", lambda *_: ())
    starts = make_plans(problem)
    gains = [least_seconds(starts, budget) / least_seconds(plans, budget) for budget in budgets_of(starts)]
    assert min(gains) >= 1
    assert max(gains) > 1.2


def test_a_lean_balance_counts_r_where_it_runs() -> None:
    assert lean_balance((3.0,) * 6, (1.0,) * 6, 2) == (3, 3)
    assert lean_balance((3.0,) * 14, (1.0,) * 14, 2) == (6, 8)
    assert lean_balance((3.0,) * 14, (0.0,) * 14, 2) == (7, 7)
    assert lean_balance((1.0,) * 3, (1.0,) * 3, 1) == (3,)


# What may be chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held",
    [
        {"recompute.mode": "never"},
        {"recompute.mode": "inline", "recompute.sets": 2},
        {"pipeline.schedule": "gpipe", "recompute.mode": "overlap"},
        {"pipeline.schedule": "1f1b", "pipeline.balance": (2, 3)},
        {"recompute.segments": 2, "pipeline.split_backward": False},
    ],
    ids=str,
)
def test_what_was_typed_is_held(held: dict[str, object]) -> None:
    problem = random_problem(7)
    layers = dataclasses.replace(problem.profile, layers=(*problem.profile.layers[:5], _loss(problem, 5)))
    policy = {key.split(".")[1]: value for key, value in held.items() if key.startswith("recompute.")}
    wanted = PlanProblem(layers, 4, 2, num_microbatches=4, policy=RecomputePolicy(**policy), held=held)  # type: ignore[arg-type]
    names = {"recompute.mode": "mode", "pipeline.schedule": "schedule", "pipeline.balance": "balance"}
    plans = make_plans(wanted)
    assert plans.plans
    for one in plans.plans:
        assert not held.keys() & one.keys.keys()
        assert all(getattr(one.choice, names[key]) == value for key, value in held.items() if key in names)


def _loss(problem: PlanProblem, number: int) -> object:
    return dataclasses.replace(problem.profile.layers[-1], numbers=(number,))


def test_the_batch_is_cut_into_equal_microbatches_of_sizes_that_are_known() -> None:
    problem = dataclasses.replace(random_problem(3), batch=12, num_ranks=2, held={}, num_microbatches=6)
    profile = dataclasses.replace(problem.profile, samples=2, link=None)
    assert list(layouts_of(dataclasses.replace(problem, profile=profile))) == [(1, 2, 6)]
    known = dataclasses.replace(profile, smaller=profile.layers)
    assert [m for _, _, m in layouts_of(dataclasses.replace(problem, profile=known))] == [1, 2, 3, 4, 6, 12]
    linked = dataclasses.replace(known, link=Link(0.0, 1e9))
    found = layouts_of(dataclasses.replace(problem, profile=linked))
    assert {(replicas, ranks) for replicas, ranks, _ in found} == {(1, 2), (2, 1)}


def test_a_profile_lies_on_the_line_through_two_sizes() -> None:
    problem = random_problem(3)
    one = problem.profile.layers
    four = tuple(dataclasses.replace(layer, forward_seconds=4.0, inner_bytes=layer.inner_bytes + 300) for layer in one)
    one = tuple(dataclasses.replace(layer, forward_seconds=1.0) for layer in one)
    profile = dataclasses.replace(problem.profile, layers=four, samples=4, smaller=one)
    assert profile.at(4) is profile
    assert [layer.forward_seconds for layer in profile.at(3).layers] == [3.0] * len(one)
    assert [layer.inner_bytes for layer in profile.at(7).layers] == [layer.inner_bytes + 600 for layer in one]
    with pytest.raises(ValueError, match="of microbatches of 4 samples, and this has 2; measure again"):
        dataclasses.replace(profile, smaller=()).at(2)


def test_lines_of_a_rank_add_up() -> None:
    numbers = random.Random(0).sample(range(1, 1000), 12)
    rank = RankMemory(*numbers)
    assert rank.total == sum(numbers) - rank.allocator_slack_expandable


def test_its_keys_bound_what_a_run_may_hold() -> None:
    """Any order that the run's own search finds has no more in flight, nor more slots."""
    problem = dataclasses.replace(random_problem(11), num_ranks=3, batch=6, num_microbatches=6, held={})
    for one in make_plans(problem).plans:
        if one.choice.schedule == AUTO:
            assert one.choice.stash is not None
            assert one.keys["recompute.stash"] == f"[{','.join(map(str, one.choice.stash))}]"
            assert (one.choice.mode == "never") == (one.keys["recompute.sets"] == "null")


def test_the_search_is_kept_for_the_run(tmp_path: Path) -> None:
    problem = dataclasses.replace(random_problem(11), num_ranks=3, batch=6, num_microbatches=6, held={})
    make_plans(problem, search_seconds=1.0, cache=tmp_path)
    assert list(tmp_path.iterdir())


# What a rank holds ----------------------------------------------------------------------------------------------------


def footprint(balance: tuple[int, ...], microbatches: int, **holdings: object) -> Footprint:
    """Of stages of layers that each have a set of 100 bytes, an input and an output of 10, and 8 bytes of weights."""
    count = sum(balance)
    layers = (*(layer(number, 1.0, 100, 10, 8) for number in range(count)), layer(count, 0.1, 30, 10, 0, LOSS))
    return Footprint(Profile(layers=layers), balance, RecomputePolicy(), microbatches, Holdings(**holdings))  # type: ignore[arg-type]


def test_message_buffers_are_counted() -> None:
    """With 64 microbatches in flight on a stage and two on the next, what that does not take yet waits to be sent."""
    held = footprint((1, 1, 1), 64)
    assert held.messages(0, (3, 2, 1)) == (1 + 2) * 10  # an output, two gradients
    assert held.messages(1, (3, 2, 1)) == (2 + 1) * 10 + (1 + 2) * 10
    assert held.messages(2, (3, 2, 1)) == (2 + 1) * 10
    assert held.messages(0, (64, 2, 1)) == (1 + 60 + 2) * 10
    assert footprint((1, 1, 1), 64, prefetch=0).messages(0, (3, 2, 1)) == (1 + 1) * 10
    many, few = held.of_limits((64, 2, 1), None)[0], held.of_limits((3, 2, 1), None)[0]
    assert many.message_buffers - few.message_buffers == 60 * 10


def test_lines_of_weights_and_their_state() -> None:
    plain = footprint((2, 2), 4).fixed([0])
    assert (plain.weights, plain.gradients, plain.masters, plain.optimizer_state) == (16, 16, 0, 32)
    half = footprint((2, 2), 4, has_masters=True, shards=2).fixed([0])
    assert (half.weights, half.gradients, half.masters, half.optimizer_state) == (16, 32, 16, 32)
    assert footprint((2, 2), 4, casts=True).fixed([0]).weights == 24
    tied = footprint((4,), 4, tied=((0, 3),)).fixed([0])
    assert (tied.weights, tied.gradients, tied.optimizer_state) == (24, 24, 48)
    assert footprint((2, 2), 4, tied=((0, 3),)).fixed([0]) == plain


def test_the_bound_of_slots_is_no_less_than_what_any_order_holds() -> None:
    """By limits and slots, against schedules that keep to them."""
    held = footprint((2, 2, 2), 6)
    for slots, limits in (((1, 1, 1), (3, 2, 1)), ((2, 2, 1), (6, 4, 1)), ((3, 1, 1), (4, 3, 1))):
        policy = RecomputePolicy(sets=slots, stash=limits)
        schedule = make(ScheduleSpec(AUTO, (0, 1, 2), 6, policy, costs=Costs.spread(3)))
        bound, exact = held.of_limits(limits, slots), held.of_schedule(schedule)
        assert all(one.total >= other.total for one, other in zip(bound, exact))
        simulated = held.of_step(schedule, simulate(schedule, Costs.spread(3)))
        assert all(one.inputs + one.sets + one.message_buffers + 110 >= most for one, most in zip(bound, simulated))


def test_the_first_step_holds_a_set_more_where_r_is_proved() -> None:
    """F of the first microbatch that R brings back keeps its set for the proof, and copies its input; the last stage recomputes nothing."""
    schedule = make(ScheduleSpec("gpipe", (0, 1), 4, RecomputePolicy()))
    proved, plain = (footprint((2, 2), 4, proves=proves).of_schedule(schedule) for proves in (True, False))
    of_a_layer, copy = 100 + 10, 10
    assert (proved[0].total - plain[0].total, proved[1]) == (of_a_layer + copy, plain[1])
    limits, slots = (4, 1), (1, 1)
    proved, plain = (footprint((2, 2), 4, proves=proves).of_limits(limits, slots) for proves in (True, False))
    assert proved[0].sets - plain[0].sets == 2 * 100 + 10 + of_a_layer + copy  # beside a slot that is full
    assert proved[1] == plain[1]


def test_a_step_holds_batches_and_outputs_that_are_on_their_way() -> None:
    """Two kept sets of stage 0 hold on to the batch of the first step, and an output leaves 5 ms after its F at the earliest."""
    held = footprint((1, 1), 4)
    schedule = make(ScheduleSpec("gpipe", (0, 1), 4, RecomputePolicy(mode="never")))  # type: ignore[arg-type]
    batch, sets, outputs = 4 * 10, 4 * 100, 4 * 10
    slow, fast = (Costs.spread(2, forward=seconds, backward=2 * seconds) for seconds in (1.0, 0.0001))
    at_once, in_turn = (held.of_step(schedule, simulate(schedule, costs))[0] for costs in (fast, slow))
    assert at_once == 2 * batch + sets + outputs
    assert in_turn < at_once


def test_what_w_waits_for_is_a_line() -> None:
    held = footprint((2, 2), 4)
    schedule = make(ScheduleSpec("zb-h1", (0, 1), 4, RecomputePolicy(mode="never")))  # type: ignore[arg-type]
    assert held.of_schedule(schedule)[1].weight_queue > 0
    whole = make(ScheduleSpec("1f1b", (0, 1), 4, RecomputePolicy(mode="never")))  # type: ignore[arg-type]
    assert [rank.weight_queue for rank in held.of_schedule(whole)] == [0, 0]
    # Two microbatches in flight: the first stage has their sets (its inputs are those of the batch), the second one with the loss.
    assert [rank.sets for rank in held.of_schedule(whole)] == [2 * (100 + 10 + 100), 10 + 100 + 10 + 100 + 10 + 30]


def test_a_gpu_has_lines_of_its_own() -> None:
    rank = footprint((2, 2), 4, on_cuda=True).of_limits((2, 1), None)[0]
    assert rank.cuda_runtime > 2**29
    assert 0 < rank.allocator_slack_expandable < rank.allocator_slack
