"""What each op waits for, and which messages there are."""

import dataclasses

import pytest
from spelled import lane, ops, waits

from pipetrain.schedule.alive import peak_sets
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.families import Shape
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy


def test_overlap() -> None:
    schedule = make_schedule(num_stages=3, num_microbatches=4)
    assert lane(schedule, 1, Lane.RECOMPUTE) == "1R0 1R1 1R2 1R3"
    assert lane(schedule, 1, Lane.SEND) == " ".join(f"1SEND_{way}{i}" for way in "FB" for i in range(4))
    assert waits(schedule, "1F2") == {"1RECV_F2"}
    assert waits(schedule, "1R0") == {"1F0"}
    assert waits(schedule, "1R2") == {"1F2", "1B1"}
    assert waits(schedule, "1B2") == {"1R2", "1RECV_B2"}
    assert waits(schedule, "1SEND_F2") == {"1F2"}
    assert waits(schedule, "1SEND_B2") == {"1B2"}
    assert waits(schedule, "2B1") == set()


def test_two_sets_ahead_wait_for_the_b_before_the_last() -> None:
    schedule = make_schedule(num_stages=2, num_microbatches=4, recompute=RecomputePolicy(sets=2, keep="none"))
    assert [waits(schedule, f"0R{i}") for i in range(4)] == [{"0F0"}, {"0F1"}, {"0F2", "0B0"}, {"0F3", "0B1"}]


def test_inline_waits_for_its_gradient_and_early_does_not() -> None:
    for mode, expected in (("inline", {"1RECV_B2"}), ("early", set())):
        schedule = make_schedule(num_stages=3, num_microbatches=3, recompute=mode)
        assert lane(schedule, 1, Lane.COMPUTE) == "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1R2 1B2"
        assert waits(schedule, "1R2") == expected


@pytest.mark.parametrize(
    ("ahead", "third_activation", "third_gradient"),
    [(0, {"2B1"}, {"1B1"}), (1, {"2F1"}, {"1B1"}), (2, {"2F0"}, {"1B0"}), (3, set(), {"1F2"})],
)
def test_receives_are_posted_ahead(ahead: int, third_activation: set[str], third_gradient: set[str]) -> None:
    schedule = make_schedule(num_stages=3, num_microbatches=4, recompute="never", transport_ahead=ahead)
    assert waits(schedule, "2RECV_F2") == third_activation
    assert waits(schedule, "1RECV_B2") == third_gradient


def test_the_first_gradients_leave_the_way_to_the_last_activations() -> None:
    gpipe = make_schedule(num_stages=3, num_microbatches=8)
    assert [waits(gpipe, f"1RECV_B{i}") for i in range(4)] == [{"1F6"}, {"1F6"}, {"1B0"}, {"1B1"}]
    assert waits(gpipe, "0RECV_B0") == set()  # nothing else comes in
    classic = make_schedule("1f1b", num_stages=4, num_microbatches=8)
    assert waits(classic, "1RECV_B0") == set()  # used before the last forwards
    assert waits(classic, "1RECV_B7") == {"1B5"}


def test_inputs_that_a_stage_stashes_at_once_may_all_come_early() -> None:
    gpipe = make_schedule(num_stages=3, num_microbatches=4, recompute="never")
    assert all(waits(gpipe, f"1RECV_F{microbatch}") == set() for microbatch in range(4))
    classic = make_schedule("1f1b", num_stages=4, num_microbatches=8, recompute="never")
    assert waits(classic, "1RECV_F2") == set()  # three forwards in flight
    assert waits(classic, "1RECV_F3") == {"1F1"}


def test_just_in_time_is_after_the_op_before_also_where_that_is_an_r() -> None:
    early = make_schedule(num_stages=3, num_microbatches=3, recompute="early", transport_ahead=0)
    inline = make_schedule(num_stages=3, num_microbatches=3, recompute="inline", transport_ahead=0)
    assert waits(early, "1RECV_B1") == {"1R1"}
    assert waits(inline, "1RECV_B1") == {"1B0"}  # not R1, which waits for this receive
    assert waits(inline, "1RECV_F0") == set()


def test_neighbours_on_one_rank_hand_over_without_messages() -> None:
    schedule = make_schedule(num_stages=2, num_ranks=1, num_microbatches=2, recompute=RecomputePolicy("inline"))
    assert lane(schedule, 0, Lane.SEND) == lane(schedule, 0, Lane.RECV) == ""
    assert waits(schedule, "1F1") == {"0F1"}
    assert waits(schedule, "0R1") == waits(schedule, "0B1") == {"1B1"}


def test_nothing_flows_back_where_nothing_needs_a_gradient() -> None:
    schedule = make_schedule(num_stages=4, num_microbatches=2, first_backward=2)
    kinds = {stage: {op.kind for _, _, op in schedule.ops() if op.stage == stage} for stage in range(4)}
    assert kinds[0] == {Kind.F, Kind.SEND_F}
    assert kinds[1] == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert kinds[2] == {Kind.F, Kind.R, Kind.B, Kind.SEND_F, Kind.RECV_F, Kind.RECV_B}
    assert kinds[3] == {Kind.F, Kind.B, Kind.RECV_F, Kind.SEND_B}
    assert {stage for stage, _ in schedule.kept} == {3}


def test_forwards_only() -> None:
    for family, first in (("inference", 0), ("gpipe", 3)):
        schedule = make_schedule(family, num_stages=3, num_microbatches=2, first_backward=first)
        assert {op.kind for _, _, op in schedule.ops()} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
        assert schedule.first_backward == 3
        assert not schedule.kept


def test_r_waits_while_kept_sets_take_the_places() -> None:
    """Two places, microbatches 0 and 1 kept: R2 finds one after B0, R3 after B1; all earlier it would be the third."""
    schedule = make_schedule(num_stages=2, num_microbatches=4, recompute=RecomputePolicy(sets=2))
    assert {microbatch for stage, microbatch in schedule.kept if stage == 0} == {0, 1}
    assert {str(op): waits(schedule, str(op)) for op in schedule.lane(0, Lane.RECOMPUTE)} == {
        "0R2": {"0F2", "0B0"},
        "0R3": {"0F3", "0B1"},
    }
    assert [peak.sets for peak in peak_sets(schedule)] == [2, 1]


def test_r_waits_beside_a_kept_set_of_later() -> None:
    """Microbatch 2 is kept beside R0's set, so that R1 finds a place after B0; with one place there is none for R0 either."""

    def order(_: Shape) -> list[list[Op]]:
        return [[*ops("0F0 0F1 0F2 0R0 0B0 0R1 0B1 0B2")]]

    policy = RecomputePolicy(sets=2, last_stage="always")  # type: ignore[arg-type]
    schedule = make_schedule(order, num_stages=1, num_microbatches=3, recompute=policy)
    check(schedule)
    assert schedule.kept == {(0, 2)}
    assert waits(schedule, "0R1") == {"0F1", "0B0"}
    one = dataclasses.replace(policy, sets=1)
    with pytest.raises(ScheduleError, match="stage 0 can have 2 sets alive at once, but only 1 activation slot"):
        check(make_schedule(order, num_stages=1, num_microbatches=3, recompute=one))


def test_each_stage_has_places_of_its_own() -> None:
    policy = RecomputePolicy(sets=[3, 1, 2, 1], keep="none")  # type: ignore[arg-type]
    schedule = make_schedule(num_stages=4, num_microbatches=4, recompute=policy)
    assert hash(policy) == hash(RecomputePolicy(sets=(3, 1, 2, 1), keep="none"))  # type: ignore[arg-type]
    assert [waits(schedule, f"{stage}R3") for stage in range(3)] == [{"0F3", "0B0"}, {"1F3", "1B2"}, {"2F3", "2B1"}]
    check(schedule)


def test_early_r_goes_into_a_gap_where_a_place_is_free() -> None:
    numbers = {"num_stages": 3, "num_microbatches": 4}
    one, two = (
        make_schedule(recompute=RecomputePolicy("early", sets=sets, keep="none"), **numbers)  # type: ignore[arg-type]
        for sets in (1, 2)
    )
    assert lane(one, 0, Lane.COMPUTE) == "0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3"
    assert lane(two, 0, Lane.COMPUTE) == "0F0 0F1 0F2 0F3 0R0 0R1 0B0 0R2 0B1 0R3 0B2 0B3"
    check(two)
    assert [peak.sets for peak in peak_sets(two)] == [2, 2, 1] or [peak.sets for peak in peak_sets(two)] == [2, 1, 1]
