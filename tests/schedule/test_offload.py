"""Sets that go to host memory and back: where they have a place, what `check` refuses, and how fast a step can be."""

import dataclasses
import random
from pathlib import Path

import pytest
from examples import examples
from hypothesis import strategies as st
from random_schedules import with_lane
from spelled import lane, ops, waits

from pipetrain.config.load import load_config
from pipetrain.config.problem import ConfigError
from pipetrain.engine.available import check_engine
from pipetrain.monitor.breakdown import break_down, bytes_over_time, sets_over_time
from pipetrain.monitor.draw.terminal import staircase
from pipetrain.schedule.alive import peak_on_host, peak_sets
from pipetrain.schedule.bound import bound, bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv, write_csv
from pipetrain.schedule.families import Shape
from pipetrain.schedule.make import held_to, make, make_schedule, with_first_backward
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode, Offload, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.by_stage import by_solver
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import best_schedule, problem_of
from pipetrain.schedule.simulate import simulate

# Stage 0: set 0 is offloaded, 1 recomputed, 2 kept. Stage 1 keeps what its B reads at once.
LAST = "\n1F0,1B0,1F1,1B1,1F2,1B2\n"
ORDER = "0F0,0F1,0OFFLOAD0,0RELOAD0,0B0,0R1,0B1,0F2,0B2" + LAST


def written(order: str = ORDER, places: int = 1, **policy: object) -> Schedule:
    spec = spec_of(num_stages=2, microbatches=3, sets=places, **policy)
    return held_to(spec, order_of_csv(order, "order.csv", Shape((0, 1), 3)))


def spec_of(num_stages: int, microbatches: int, **policy: object) -> ScheduleSpec:
    own = RecomputePolicy(**{"offload": "auto", **policy})  # type: ignore[arg-type]
    return ScheduleSpec("auto", tuple(range(num_stages)), microbatches, own)


def test_copies_have_lanes_of_their_own_and_wait_for_places() -> None:
    schedule = written()
    check(schedule)
    assert lane(schedule, 0) == "0F0 0F1 0B0 0B1 0F2 0B2"
    assert lane(schedule, 0, Lane.RECOMPUTE) == "0R1"
    assert lane(schedule, 0, Lane.OFFLOAD) == "0OFFLOAD0"
    assert lane(schedule, 0, Lane.RELOAD) == "0RELOAD0"
    assert waits(schedule, "0OFFLOAD0") == {"0F0"}
    assert waits(schedule, "0RELOAD0") == {"0OFFLOAD0"}
    assert waits(schedule, "0B0") == {"0RECV_B0", "0RELOAD0"}
    assert waits(schedule, "0R1") == {"0F1", "0OFFLOAD0", "0B0"}
    assert schedule.kept == {(0, 2), (1, 0), (1, 1), (1, 2)}
    assert schedule.offloaded == {(0, 0)}


def test_a_step_runs_copies_beside_the_ranks() -> None:
    """F0 0-1; down 1-3, while F1 runs; up 3-5; B0 when the set is back, not when its gradient is (4)."""
    costs = Costs.spread(2, offload=2)
    schedule = written()
    times = {str(event.op): (event.start, event.end) for event in simulate(schedule, costs).events}
    starts = {"0OFFLOAD0": (1, 3), "0F1": (1, 2), "0RELOAD0": (3, 5), "0B0": (5, 7), "0R1": (7, 8)}
    assert {op: times[op] for op in starts} == starts
    events = simulate(schedule, costs).of_rank(0)
    assert sets_over_time(schedule, events) == [
        (0, 1), (3, 0), (3, 1), (7, 0), (7, 1), (10, 0), (10, 1), (16, 0)
    ]  # fmt: skip
    first, _ = break_down(schedule, simulate(schedule, costs))
    assert first.wait_gradient_seconds + first.imbalance_seconds == 5
    assert (first.wait_copy_seconds, first.unexplained_seconds) == (1, 0)
    sized = dataclasses.replace(costs, input_bytes=(1.0, 1.0), set_bytes=(16.0, 16.0))
    held = dict(bytes_over_time(schedule, events, sized))
    assert held[1] == 16 + 1  # the set of F0 and the input of F1
    assert max(held.values()) == 16 + 1
    assert staircase(simulate(schedule, costs), width=60).splitlines()[:3] == PICTURE.splitlines()[1:]


PICTURE = """
rank 0 F0-F1-.........B0====R1~B1====F2-.........B2====
       ...0vvvvv.......................................
       .........0^^^^^.................................
"""


WHOLE = [(name, 1) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "inference")]
WAYS = [("overlap", "auto", 2), ("inline", "auto", 2), ("early", "always", 2), ("overlap", "always", 1)]


@pytest.mark.parametrize(("family", "segments"), [*WHOLE, ("gpipe", 2), ("interleaved", 3)])
def test_every_family_finds_places(family: str, segments: int) -> None:
    for mode, offload, sets in WAYS:
        shape = {"num_ranks": 2} if family in ("interleaved", "zbv") else {}
        placement = "v" if family == "zbv" else "loop"
        costs = Costs.spread(4, offload=1.5, hop=0.25)
        policy = RecomputePolicy(mode=Mode(mode), sets=sets, offload=Offload(offload), segments=segments)
        schedule = make_schedule(
            family, num_stages=4, num_microbatches=6, recompute=policy, costs=costs, placement=placement, **shape
        )
        has_room_whatever_the_timing(schedule)
        if offload == "always" and family != "inference":
            assert len(schedule.offloaded) + len(schedule.kept) == 24
            assert len(schedule.offloaded) >= 12
        if schedule.order:
            text = write_csv(schedule)
            again = make_schedule(
                lambda shape: order_of_csv(text, "again.csv", shape),  # noqa: B023
                num_stages=4, num_microbatches=6, recompute=policy, costs=costs, placement=placement, **shape,
            )  # fmt: skip
            assert write_csv(again) == text
            assert (again.lanes, again.kept) == (schedule.lanes, schedule.kept)


def has_room_whatever_the_timing(schedule: Schedule) -> None:
    """No costs make a stage hold more sets than it has places, on the device or on the host."""
    check(schedule)
    chance = random.Random(0)
    peaks = [peak.places for peak in peak_sets(schedule)]
    for _ in range(4):
        times = [[chance.choice((0, 0.1, 1, 5)) for _ in range(schedule.num_stages)] for _ in range(4)]
        costs = Costs.spread(
            schedule.num_stages, forward=times[0], backward=times[1], recompute=times[2], offload=times[3]
        )
        events = simulate(schedule, costs).events
        for stage in range(schedule.num_stages):
            own = [event for event in events if event.op.stage == stage]
            most = max((count for _, count in sets_over_time(schedule, own)), default=0)
            assert most <= peaks[stage] <= (schedule.policy.places_of(stage) or most)
            for part in {event.op.part for event in own if event.lane is Lane.OFFLOAD}:
                of_part = [event for event in own if event.op.part == part]
                assert _on_host(of_part) <= peak_on_host(schedule, stage)[0]


def _on_host(events: list) -> int:
    changes = [(event.start, 1) for event in events if event.lane is Lane.OFFLOAD]
    changes += [(event.end, -1) for event in events if event.lane is Lane.RELOAD]
    held = [0]
    for _, change in sorted(changes):
        held.append(held[-1] + change)
    return max(held)


# What `check` refuses --------------------------------------------------------------------------------------------------


def refused(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as raised:
        check(schedule)
    return " ".join(str(raised.value).splitlines()[:2])


def without(schedule: Schedule, op: str, awaited: str) -> Schedule:
    own = Op.parse(op)
    left = tuple(other for other in schedule.waits[own] if other != Op.parse(awaited))
    assert left != schedule.waits[own]
    return dataclasses.replace(schedule, waits={**schedule.waits, own: left})


def test_a_copy_has_another_end() -> None:
    schedule = written()
    assert "0RELOAD0: is missing" in refused(with_lane(schedule, 0, Lane.RELOAD, ()))
    assert "0R0: is missing" in refused(with_lane(schedule, 0, Lane.OFFLOAD, ()))
    both = with_lane(schedule, 0, Lane.OFFLOAD, ops("0OFFLOAD0 0OFFLOAD1"))
    assert "0RELOAD1: is missing" in refused(both)
    assert "0OFFLOAD1: the set is kept, recomputed" in refused(
        with_lane(both, 0, Lane.RELOAD, ops("0RELOAD0 0RELOAD1"))
    )
    assert "lives on rank 1" in refused(with_lane(schedule, 0, Lane.OFFLOAD, ops("1OFFLOAD0")))
    assert "belongs into the offload lane" in refused(with_lane(schedule, 0, Lane.RELOAD, ops("0RELOAD0 0OFFLOAD1")))


@pytest.mark.parametrize(
    ("op", "awaited", "says"),
    [
        ("0OFFLOAD0", "0F0", "0OFFLOAD0: does not wait for 0F0"),
        ("0RELOAD0", "0OFFLOAD0", "0RELOAD0: does not wait for 0OFFLOAD0"),
        ("0B0", "0RELOAD0", "0B0: does not wait for 0RELOAD0"),
        ("0R1", "0B0", "stage 0 can have 2 sets alive at once"),
    ],
)
def test_each_wait_of_a_copy_is_needed(op: str, awaited: str, says: str) -> None:
    assert says in refused(without(written(), op, awaited))


def test_f_waits_until_a_copy_frees_its_place() -> None:
    order = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0B0,0F2,0OFFLOAD2,0RELOAD1,0B1,0RELOAD2,0B2" + LAST
    schedule = written(order)
    has_room_whatever_the_timing(schedule)
    assert waits(schedule, "0F1") == {"0OFFLOAD0"}
    assert waits(schedule, "0RELOAD1") == {"0OFFLOAD1", "0B0", "0OFFLOAD2"}
    assert "0F1" in refused(without(schedule, "0F1", "0OFFLOAD0"))


def test_no_circle_runs_through_copies() -> None:
    schedule = written()
    circle = dataclasses.replace(schedule, waits={**schedule.waits, Op.parse("0OFFLOAD0"): ops("0F0 0B0")})
    assert "There is no deadlock" in refused(circle)
    assert "0OFFLOAD0" in refused(circle)


def test_more_sets_than_places_in_the_order_are_refused() -> None:
    order = "0F0,0F1,0OFFLOAD0,0RELOAD0,0B0,0B1,0F2,0B2" + LAST
    assert "stage 0 can have 2 sets alive at once" in refused(written(order))


def test_sets_on_the_host_have_a_bound() -> None:
    order = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0B0,0RELOAD1,0B1,0F2,0B2" + LAST
    assert peak_on_host(written(order), 0)[0] == 2
    bounded = written(order, places=2, host_sets=1)
    check(bounded)
    assert waits(bounded, "0OFFLOAD1") == {"0F1", "0RELOAD0"}
    assert peak_on_host(bounded, 0)[0] == 1
    unbounded = dataclasses.replace(written(order), policy=bounded.policy)
    assert "0OFFLOAD1: stage 0 can have 2 sets in host memory at once; allowed are 1" in refused(unbounded)


def test_a_set_in_parts_goes_part_by_part() -> None:
    """F fills both slots of stage 0; each part frees its own, and B of the last part waits for that part alone."""
    order = "0F0,0OFFLOAD0.0,0OFFLOAD0.1,0F1,0OFFLOAD1.1,0RELOAD0.1,0B0.1,0OFFLOAD1.0,0RELOAD0.0,0B0.0,0RELOAD1.1,0B1.1,0RELOAD1.0,0B1.0"
    spec = spec_of(2, 2, sets=1, segments=2)
    own = order_of_csv(f"{order}\n1F0,1B0,1F1,1B1\n", "order.csv", spec.shape)
    schedule = held_to(spec, own)
    has_room_whatever_the_timing(schedule)
    assert waits(schedule, "0F1") == {"0OFFLOAD0.1"}
    assert waits(schedule, "0RELOAD0.1") == {"0OFFLOAD0.1", "0OFFLOAD1.1"}
    assert waits(schedule, "0RELOAD0.0") == {"0OFFLOAD0.0", "0OFFLOAD1.1", "0B0.1"}
    assert "0RELOAD0.1" in waits(schedule, "0B0.1")
    assert peak_on_host(schedule, 0)[0] == 2
    assert "0B0.0: does not wait for 0RELOAD0.0" in refused(without(schedule, "0B0.0", "0RELOAD0.0"))
    lanes = schedule.lane(0, Lane.OFFLOAD)
    assert "0OFFLOAD0.1: is missing" in refused(with_lane(schedule, 0, Lane.OFFLOAD, lanes[:1] + lanes[2:]))
    events = simulate(schedule, Costs.spread(2, offload=4.0)).events
    seconds = {str(event.op): event.end - event.start for event in events}
    assert seconds["0OFFLOAD0.0"] == seconds["0RELOAD0.1"] == 2.0
    sized = dataclasses.replace(
        Costs.spread(2, offload=1.0), input_bytes=(10, 10), set_bytes=(100, 100), kept_bytes=(20, 20)
    )
    own = [event for event in simulate(schedule, sized).events if event.op.stage == 0]
    held = [held for _, held in bytes_over_time(schedule, own, sized)]
    assert held[-1] == 0


def test_what_cannot_run_is_refused_in_one_line() -> None:
    for keys in ({"mode": "never"}, {"segments": 2}, {"segments": 2, "sets": (1, 0.5)}, {"offload": "often"}):
        with pytest.raises(ValueError, match=r"recompute\.offload=") as raised:
            RecomputePolicy(**{"offload": "auto", **keys})  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"recompute\.offload=none, but the schedule itself has 0OFFLOAD0"):
        written(offload="none")
    for host_bytes in (0, -1, "much", 1.5):
        with pytest.raises(ValueError, match=r"recompute\.host_bytes=.* allowed are a number of bytes, 1 or more"):
            RecomputePolicy(offload="auto", host_bytes=host_bytes)  # type: ignore[arg-type]
    config = load_config(["recompute.offload=auto", "engine=deepspeed", "pipeline=1f1b", "recompute.mode=inline"])
    with pytest.raises(ConfigError, match=r"recompute\.offload=auto: not supported by engine=deepspeed, which copies"):
        check_engine(config)


# How long a step takes --------------------------------------------------------------------------------------------------

STEP_NEVER = {(p, m): 3 * (m + p - 1) for p, m in ((3, 6), (4, 16))}


def test_bounds_are_those_of_equal_stages() -> None:
    """Places, lanes and compute for f = 1, b = 2, r = 1, by their formulas, over all numbers of sets."""
    for p, m, places, o in ((3, 6, 1, 1.0), (4, 16, 1, 1.0), (4, 16, 2, 3.0), (4, 8, 4, 4.0)):
        least = max(
            min(_least(p, m, places, o, s, kept, away) for kept in range(m + 1) for away in range(m + 1 - kept))
            for s in range(p - 1)
        )
        costs, compute = Costs.spread(p, offload=o), 3 * (m + p - 1)
        auto, always = (RecomputePolicy(sets=places, offload=way) for way in (Offload.AUTO, Offload.ALWAYS))
        assert bound(costs, m, policy=auto) == pytest.approx(max(least, compute))
        most = max(_least(p, m, places, o, s, 0, m) for s in range(p - 1))
        assert bound(costs, m, policy=always) == pytest.approx(max(most, compute))


def _least(p: int, m: int, places: int, o: float, s: int, kept: int, away: int) -> float:
    again, life = m - kept - away, 3 * (p - s)
    compute = 3 * m + 3 * s + again
    in_places = 3 * s + (kept * life + away * (3 + 2 * o) + again * 3) / places
    return max(compute, in_places, 3 * s + 3 + (away + 1) * o if away else 0.0)


def best(p: int, m: int, places: int, o: float, steps: float) -> float:
    spec, costs = spec_of(p, m, sets=places), Costs.spread(p, offload=o)
    found = best_schedule(spec, costs, Effort(1.0, rules=20, steps=steps))
    has_room_whatever_the_timing(found.schedule)
    assert found.seconds == simulate(found.schedule, costs).step_seconds >= found.least_seconds
    return found.seconds / (3 * (m + p - 1))


def test_the_search_finds_the_optimum_of_a_small_problem() -> None:
    assert best(3, 6, 1, 1.0, steps=4.0) == pytest.approx(25 / 24)


def test_what_was_found_is_found_again(tmp_path: Path) -> None:
    spec, costs, effort = spec_of(3, 6, sets=1), Costs.spread(3, offload=1), Effort(1.0, rules=20, steps=4.0)
    found = best_schedule(spec, costs, effort, tmp_path)
    said: list[str] = []
    again = best_schedule(spec, costs, effort, tmp_path, said.append)
    assert again.schedule.order == found.schedule.order != ()
    assert (again.seconds, again.least_seconds, said) == (found.seconds, found.least_seconds, [])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_sets_at_the_speed_of_all() -> None:
    assert best(4, 16, 2, 1.0, steps=60.0) == 1.0


def test_frozen_stages_have_no_sets_to_copy() -> None:
    costs = Costs.spread(3, offload=1)
    for first in range(4):
        for family in ("auto", "1f1b"):
            policy = RecomputePolicy(offload=Offload.ALWAYS)
            schedule = make(ScheduleSpec(family, (0, 1, 2), 4, policy, costs=costs, first_backward=first))
            has_room_whatever_the_timing(schedule)
            assert {stage for stage, _ in schedule.offloaded} == set(range(first, 2))
            if first < 2:
                later = with_first_backward(schedule, first + 1)
                has_room_whatever_the_timing(later)
                assert {stage for stage, _ in later.offloaded} == set(range(first + 1, 2))


@pytest.mark.parametrize("family", ["auto", "gpipe"])
def test_ops_of_no_length_find_places(family: str) -> None:
    chance = random.Random(1)
    for offload in (Offload.AUTO, Offload.ALWAYS) * 6:
        times = [[chance.choice((0, 0, 1, 2)) for _ in range(3)] for _ in range(4)]
        costs = Costs.spread(3, forward=times[0], backward=times[1], recompute=times[2], offload=times[3])
        policy = RecomputePolicy(sets=chance.choice((1, 2)), offload=offload)
        spec = ScheduleSpec(family, (0, 1, 2), chance.choice((1, 3)), policy, costs=costs)
        has_room_whatever_the_timing(make(spec))


def test_copies_that_cost_too_much_are_declined() -> None:
    spec, costs = spec_of(4, 8, sets=2), Costs.spread(4, offload=40)
    schedule = make(dataclasses.replace(spec, costs=costs))
    assert not schedule.offloaded
    assert simulate(schedule, costs).step_seconds < 40


@st.composite
def problems(draw: st.DrawFn, most_stages: int = 8) -> tuple[ScheduleSpec, Costs]:
    stages = draw(st.integers(2, most_stages))
    microbatches = draw(st.integers(1, 12))
    times = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]), min_size=stages, max_size=stages)
    forward = draw(times)
    backward, again, hop = draw(times), draw(times), draw(st.sampled_from([0.0, 0.25, 1.0]))
    offload = [seconds * draw(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])) for seconds in forward]
    costs = Costs.spread(stages, forward=forward, backward=backward, recompute=again, hop=hop, offload=offload)
    mode = draw(st.sampled_from([Mode.OVERLAP, Mode.INLINE, Mode.EARLY]))
    sets = draw(st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=stages, max_size=stages)))
    host = draw(st.sampled_from([None, None, 1, 2]))
    family = draw(st.sampled_from(["auto", "gpipe", "1f1b"]))
    split = draw(st.booleans()) and family != "1f1b"
    segments = 1 if split else draw(st.sampled_from([1, 1, 2, 3]))
    policy = RecomputePolicy(mode=mode, sets=sets, offload=Offload.AUTO, host_sets=host, segments=segments)
    spec = ScheduleSpec(family, tuple(range(stages)), microbatches, policy, costs=costs, split_backward=split)
    return spec, costs


@examples(5, 100, problems())
def test_never_worse_than_without_copies(problem: tuple[ScheduleSpec, Costs]) -> None:
    spec, costs = problem
    schedule = make(spec)
    has_room_whatever_the_timing(schedule)
    without = make(dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, offload=Offload.NONE)))
    step, rounding = simulate(schedule, costs).step_seconds, 1e-9 * (1 + simulate(schedule, costs).step_seconds)
    assert step <= simulate(without, costs).step_seconds + rounding
    assert bound_of(schedule, costs) <= step + rounding
    split = spec.split_backward
    assert bound(costs, spec.num_microbatches, policy=spec.policy, split_backward=split) <= step + rounding
    for rank in break_down(schedule, simulate(schedule, costs)):
        assert rank.busy_seconds + rank.bubble_seconds == pytest.approx(step, abs=rounding)


def test_by_stage_keeps_to_its_steps() -> None:
    """Each order that it gives runs as fast as it says, with unequal stages and hops."""
    costs = Costs.spread(3, forward=[1, 2, 1], backward=[2, 3, 2], hop=0.5, offload=[1, 2, 1])
    spec = dataclasses.replace(spec_of(3, 6, sets=1), costs=costs)
    start = simulate(make(spec), costs).step_seconds
    for order in by_solver(problem_of(spec, costs), start * 1.1, Effort(1.0, steps=3.0), lambda order: order.seconds):
        schedule = held_to(spec, [list(lane) for lane in order.lanes])
        has_room_whatever_the_timing(schedule)
        assert simulate(schedule, costs).step_seconds <= order.seconds + 1e-9
        start = min(start, order.seconds)
    assert start < simulate(make(spec), costs).step_seconds * 1.1
