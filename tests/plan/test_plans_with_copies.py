"""A plan sends sets to host memory where that is faster in the same bytes, and only where the time of a copy is known."""

import dataclasses
import math

import pytest
from random_plans import layer, random_problem

from pipetrain.plan.footprint import Footprint, Holdings
from pipetrain.plan.planner import Plans, make_plans
from pipetrain.plan.profile import HostLink, Profile
from pipetrain.plan.space import PlanProblem
from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.simulate import simulate

STAGES, MICROBATCHES = 4, 16
HELD = {"parallel.num_replicas": 1, "pipeline.num_microbatches": MICROBATCHES}


def profile(copy_seconds: float) -> Profile:
    """Four equal layers, a stage each: F and R 1 s, B 2 s, a set of 1,000 bytes."""
    speed = 1000 / copy_seconds
    layers = [layer(number, 1.0, 990, 10, 1) for number in range(STAGES)]
    same = [dataclasses.replace(one, recompute_last_seconds=1.0) for one in layers]
    return Profile(layers=tuple(same), host=HostLink(speed, speed, speed))


def problem(copy_seconds: float = 2.0, **held: object) -> PlanProblem:
    """Without the proof of the first step, which holds a set more."""
    given = {**HELD, **held}
    return PlanProblem(
        profile(copy_seconds), MICROBATCHES, STAGES, MICROBATCHES, held=given, holdings=Holdings(proves=False)
    )


def with_copies(plans: Plans) -> list[str]:
    return [str(one.choice.offload) for one in plans.plans if one.choice.offload != "none"]


def test_copies_bring_the_time_of_more_sets() -> None:
    """Two sets of four: faster than by recomputation alone, and 4 % from the step with all of them."""
    held = {"pipeline.schedule": "auto", "pipeline.split_backward": False}
    plans, plain = make_plans(problem(**held)), make_plans(problem(**held, **{"recompute.offload": "none"}))
    best = next(one for one in plans.plans if one.choice.offload == "auto" and max(one.choice.slots or ()) == 2)
    assert best.step_seconds <= 1.045 * 57.0
    assert best.step_seconds < plain.within(best.peak_bytes)[0].step_seconds
    check(best.schedule)
    assert best.keys["recompute.offload"] == "auto"
    assert max(best.host_bytes) > 0
    assert best.as_json()["offload"] == "auto"


@pytest.mark.slow
def test_slow_copies_are_declined() -> None:
    assert with_copies(make_plans(problem(40.0))) == []


def test_without_the_time_of_a_copy_nothing_is_copied() -> None:
    unknown = dataclasses.replace(problem(), profile=dataclasses.replace(profile(2.0), host=None))
    assert with_copies(make_plans(unknown)) == []


@pytest.mark.quick("none")
@pytest.mark.parametrize("word", ["none", "always"])
def test_what_was_typed_is_held(word: str) -> None:
    plans = make_plans(problem(**{"recompute.offload": word}))
    assert {str(one.choice.offload) for one in plans.plans if one.choice.slots} == {word}
    assert all("recompute.offload" not in one.keys for one in plans.plans)


@pytest.mark.slow
def test_no_plan_may_take_more_host_memory_than_there_is() -> None:
    limited = make_plans(dataclasses.replace(problem(), host_bytes=4_000))  # of four sets
    found = [one for one in limited.plans if one.choice.offload == "auto"]
    assert found
    assert all(max(one.choice.stash or ()) <= 4 for one in found)
    assert with_copies(make_plans(dataclasses.replace(problem(), host_bytes=999))) == []


@pytest.mark.quick("0", "1", "2")
@pytest.mark.parametrize("seed", range(15), ids=str)  # each speed with each share of a copy
def test_copies_never_make_a_budget_slower(seed: int) -> None:
    """Whatever else is found: the plans without copies are among those with them."""
    plain = random_problem(seed)
    speed = 500.0 * (1 + seed % 5)
    host = HostLink(speed, speed, speed, 1.0 + 0.1 * (seed % 3))
    copied = dataclasses.replace(plain, profile=dataclasses.replace(plain.profile, host=host))
    plans, others = make_plans(plain), make_plans(copied)
    budgets = sorted({one.peak_bytes for one in (*plans.plans, *others.plans)})
    steps = [
        [min((one.step_seconds for one in found.within(budget)), default=math.inf) for budget in budgets]
        for found in (plans, others)
    ]
    assert all(with_host <= without for without, with_host in zip(*steps))
    assert steps[1] == sorted(steps[1], reverse=True)


def test_messages_take_longer_beside_copies() -> None:
    quiet = Costs.spread(STAGES, hop=0.1, offload=1.0)
    busy, slow = dataclasses.replace(quiet, copy_contention=(5.0,) * 3), Costs.spread(STAGES, hop=0.5, offload=1.0)
    policy = RecomputePolicy(sets=2, offload="always")  # type: ignore[arg-type]
    copied, plain = (
        make_schedule("1f1b", num_stages=STAGES, num_microbatches=6, recompute=how, costs=quiet)
        for how in (policy, RecomputePolicy())
    )
    assert simulate(copied, busy) == simulate(copied, slow)
    assert simulate(copied, busy).step_seconds > simulate(copied, quiet).step_seconds
    assert simulate(plain, busy) == simulate(plain, quiet)


def test_small_storages_of_an_offloaded_set_stay_on_the_device() -> None:
    """Where all of it is small, a copy frees nothing: the device holds the set of every microbatch between F and B."""
    policy, costs = RecomputePolicy(sets=2, offload="always"), Costs.spread(STAGES, offload=1.0)  # type: ignore[arg-type]
    schedule = make_schedule("1f1b", num_stages=STAGES, num_microbatches=6, recompute=policy, costs=costs)
    assert schedule.offloaded
    found = []
    for staying in (0, 990):
        layers = tuple(dataclasses.replace(one, staying_bytes=staying) for one in profile(2.0).layers)
        footprint = Footprint(Profile(layers=layers), (1,) * STAGES, policy, 6, Holdings(proves=False))
        found.append([one.inputs + one.sets for one in footprint.of_schedule(schedule)])
    in_flight, batch = peak_stash(schedule)[0], 2 * 10 * 6
    assert [of_ranks[0] for of_ranks in found] == [2 * 990 + batch, in_flight * 990 + batch]
    assert in_flight == STAGES


@pytest.mark.parametrize(("segments", "sets", "left"), [(1, 1, 0), (2, 1, 0), (2, 1.5, 1)])
def test_a_set_is_counted_part_by_part(segments: int, sets: float, left: int) -> None:
    """Of two stages of two layers: one set at a time, whether its parts are copied one by one or together; with a slot more, beside the last part of
    the set that comes back first."""
    policy = RecomputePolicy(sets=sets, offload="always", segments=segments, last_stage="always")  # type: ignore[arg-type]
    policy, costs = policy.of_layers((2, 2)), Costs.spread(2, offload=1.0)
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=4, recompute=policy, costs=costs)
    assert len(schedule.offloaded) == 8
    footprint = Footprint(profile(2.0), (2, 2), policy, 4, Holdings(proves=False))
    of_set, batch, output = 990 + 10 + 990, 4 * 10, 10  # the first stage's input is a part of the batch
    found = footprint.of_step(schedule, simulate(schedule, costs))
    part = left * (990 + 10)
    assert found == (of_set + part + batch + output, 10 + of_set + part)
