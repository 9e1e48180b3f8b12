"""Schedules whose stages are recomputed in parts: order, places, cost, files; and what of it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shows import show
from spelled import lane

from benchmarks import segments
from pipetrain.monitor.shown import show_schedule
from pipetrain.schedule.alive import peak_sets
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import read_csv, write_csv
from pipetrain.schedule.make import make, make_schedule
from pipetrain.schedule.op import Kind, Lane
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec

T_NEVER = 57  # of four stages and sixteen microbatches, F 1 and B 2 long
AN_INPUT = 0.005  # of a set


def of_two(mode: str, **more: object) -> Schedule:
    """Two stages, two microbatches, two parts."""
    policy = RecomputePolicy(mode, segments=2, **more)  # type: ignore[arg-type]
    return make_schedule(num_stages=2, num_microbatches=2, recompute=policy)


def test_parts_come_back_one_after_the_other_from_the_last() -> None:
    schedule = of_two("inline")
    check(schedule)
    assert lane(schedule, 0) == "0F0 0F1 0R0.1 0B0.1 0R0.0 0B0.0 0R1.1 0B1.1 0R1.0 0B1.0"
    # Less than a set has room on the last stage, so that it recomputes as well.
    assert lane(schedule, 1) == "1F0 1F1 1R0.1 1B0.1 1R0.0 1B0.0 1R1.1 1B1.1 1R1.0 1B1.0"
    assert lane(schedule, 1, Lane.SEND) == "1SEND_B0 1SEND_B1"


def test_parts_have_a_lane_of_their_own_in_overlap() -> None:
    schedule = of_two("overlap")
    assert lane(schedule, 0) == "0F0 0F1 0B0.1 0B0.0 0B1.1 0B1.0"
    assert lane(schedule, 0, Lane.RECOMPUTE) == "0R0.1 0R0.0 0R1.1 0R1.0"
    named = {str(op): " ".join(map(str, awaited)) for op, awaited in schedule.waits.items()}
    assert named["0B0.1"] == "0RECV_B0 0R0.1"
    assert named["0B0.0"] == "0R0.0"  # its gradient comes from the part behind, in the lane's order
    assert named["0R0.0"] == "0F0 0B0.1"  # one place, for one part
    assert named["1SEND_B0"] == "1B0.0"


def test_a_kept_set_goes_back_whole_and_takes_the_places_of_its_parts() -> None:
    schedule = of_two("inline", sets=1.5)
    check(schedule)
    assert lane(schedule, 0) == "0F0 0F1 0R0.1 0B0.1 0R0.0 0B0.0 0B1"
    assert lane(schedule, 1) == "1F0 1B0 1F1 1B1"
    assert [peak.sets for peak in peak_sets(schedule)] == [1.5, 1]
    assert [peak.places for peak in peak_sets(schedule)] == [3, 2]


def test_a_part_takes_its_share_of_a_stage() -> None:
    policy = RecomputePolicy("inline", segments=2).of_layers([3])  # type: ignore[arg-type]
    assert policy.parts == ((1, 2),)
    schedule = make_schedule(num_stages=1, num_microbatches=1, recompute=policy)
    shown = show_schedule(schedule, Costs.spread(1, forward=3, backward=6, recompute=3))
    taken = {str(event.op): event.end - event.start for event in shown.timeline.events}
    assert taken == {"0F0": 3, "0R0.1": 2, "0B0.1": 4, "0R0.0": 1, "0B0.0": 2}


def test_a_part_takes_its_share_of_the_work() -> None:
    policy = RecomputePolicy("inline", segments=2).of_layers([4, 2], work=[0, 1, 1, 6, 0, 0])  # type: ignore[arg-type]
    assert [policy.share_of(0, part) for part in (0, 1, None)] == [1 / 8, 7 / 8, 1]
    assert policy.share_of(1, 0) == 1 / 2  # of the layers, where nothing is known


def test_what_is_held_counts_the_inputs_of_parts() -> None:
    shown = show(
        "1f1b", num_stages=4, num_microbatches=16, recompute=RecomputePolicy("inline", segments=4), costs=COSTS
    )
    assert [rank.peak_sets for rank in shown.breakdown] == [0.25] * 4
    held = shown.peak_sets_with_inputs()
    # The inputs of the others in flight, and a part: its own input is one of its tensors.
    assert held == pytest.approx([0.25 + (4 * n - 1) * AN_INPUT for n in (4, 3, 2, 1)])


COSTS = Costs.spread(4, input_share=AN_INPUT)


@pytest.mark.parametrize("mode", ["inline", "early", "overlap"])
def test_half_a_set_with_four_microbatches_in_flight(mode: str) -> None:
    policy = RecomputePolicy(mode, sets=0.5, stash=4, segments=4)  # type: ignore[arg-type]
    shown = show("1f1b", num_stages=4, num_microbatches=16, recompute=policy, costs=COSTS)
    assert shown.step_seconds <= 1.40 * T_NEVER
    assert max(rank.peak_sets for rank in shown.breakdown) <= 0.5


def test_a_set_and_a_half_in_all() -> None:
    """By the rule, and by an order that a search found with 16000 rules (`Effort(1.0, rules=16000)`); the benchmark runs that one."""
    policy = RecomputePolicy("overlap", sets=1.25, stash=12, segments=4)  # type: ignore[arg-type]
    spec = ScheduleSpec("auto", (0, 1, 2, 3), 16, policy, costs=COSTS)
    found = replace(spec, order=read_csv(Path(segments.__file__).with_name("order.csv"), spec.shape))
    for one, seconds in ((spec, 64.75), (found, 64)):  # whole sets: 66
        shown = show_schedule(make(one), COSTS)
        assert shown.step_seconds == seconds
        assert max(shown.peak_sets_with_inputs() or ()) <= 1.5
        assert max(shown.peak_stash()) <= 12
    assert seconds <= 1.13 * T_NEVER


def test_never_has_no_parts_of_one_replica() -> None:
    never = make_schedule(num_stages=2, num_microbatches=2, recompute=RecomputePolicy("never", segments="sqrt"))  # type: ignore[arg-type]
    assert never.lanes == make_schedule(num_stages=2, num_microbatches=2, recompute="never").lanes
    assert not never.policy.in_parts


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "auto"])
def test_the_last_microbatch_goes_back_in_parts_for_replicas(family: str, tmp_path: Path) -> None:
    """Although its set is kept; so it stands in a file, and is read from it."""
    policy = RecomputePolicy("never", segments=3)  # type: ignore[arg-type]
    schedule = make_schedule(family, num_stages=2, num_microbatches=4, recompute=policy, num_replicas=2)
    path = tmp_path / "order.csv"
    path.write_text(write_csv(schedule))
    again = make_schedule(path, num_stages=2, num_microbatches=4, recompute=policy, num_replicas=2)
    for made in (schedule, again):
        check(made)
        for rank in range(2):
            back = [str(op) for op in made.lane(rank, Lane.COMPUTE) if op.kind is Kind.B]
            assert back == [f"{rank}B{i}" for i in range(3)] + [f"{rank}B3.{part}" for part in (2, 1, 0)]


def test_words_are_numbers_where_the_layers_are_known() -> None:
    sqrt = RecomputePolicy(segments="sqrt")
    assert sqrt.of_layers([16, 64, 12, 1]).parts == ((4,) * 4, (8,) * 8, (4,) * 3, (1,))
    assert RecomputePolicy(segments="layers").of_layers([3, 1]).parts == ((1, 1, 1), (1,))
    assert RecomputePolicy().of_layers([3, 1]) == RecomputePolicy()


def test_parts_that_are_known_stay() -> None:
    policy = RecomputePolicy("inline", segments=2)  # type: ignore[arg-type]
    cut = policy.of_layers([4, 3], lambda stage, parts: (1, 3) if stage == 0 else (2, 1))
    assert cut.parts == ((1, 3), (2, 1))
    assert cut.of_layers([4, 3]) is cut
    assert cut.of_layers([3, 4]).parts == ((1, 2), (2, 2))
