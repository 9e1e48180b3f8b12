"""What a device is given: one order of launching on all ranks, in which nothing hangs, and the waits of its transfers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import strategies as st
from random_schedules import random_schedules
from spelled import launched_early
from unsent import most_held_for_sends, predecessors

from pipetrain.schedule.alive import ends_stash, peak_sets, peak_stash, places_freed, places_taken
from pipetrain.schedule.check import ScheduleError, check, each_op_is_launched, launched_in_one_order
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import TRANSFER_LANES
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule, with_first_backward
from pipetrain.schedule.messages import partner_of
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate


def launched(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.launch_order[rank]))


def test_ranks_launch_in_one_order() -> None:
    schedule = for_device(make_schedule("1f1b", num_stages=2, num_microbatches=3, recompute="overlap"))
    assert launched(schedule, 0) == (
        "0F0 0R0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0R1 0F2 0SEND_F2 0RECV_B1 0B1 0R2 0RECV_B2 0B2"
    )
    assert launched(schedule, 1) == ("1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2")
    check(schedule)


def test_what_transfers_and_their_tensors_wait_for() -> None:
    made = make_schedule("1f1b", num_stages=3, num_microbatches=6)
    device = for_device(made)
    added = {
        str(op): " ".join(str(one) for one in own[len(made.waits.get(op, ())) :]) for op, own in device.waits.items()
    }
    assert added["0RECV_B0"] == "0F1"  # 1B0 stands behind 1F1
    assert added["0RECV_B1"] == "0F2"
    assert added["1RECV_B0"] == "1F0"  # through 2F0 and 2B0
    assert added["1RECV_F2"] == ""  # rank 0 runs three forwards ahead
    assert added["1RECV_F3"] == "1B0"
    assert added["0F3"] == "0SEND_F0"
    assert added["1B4"] == "1SEND_B1"


def test_a_schedule_with_other_stages_trained_is_launched_anew() -> None:
    device = for_device(make_schedule(num_stages=3, num_microbatches=3))
    fewer = with_first_backward(device, 1)
    assert not fewer.launch_order
    assert for_device(fewer) == for_device(make_schedule(num_stages=3, num_microbatches=3, first_backward=1))


def hangs(schedule: Schedule, order: tuple[tuple[Op, ...], ...], barriers: list[set[int]]) -> bool:
    """By trial, from the definition: each host launches in `order`, and waits for its device before the ops at `barriers`.

    An op on the device starts when it has been launched and its waits and the op before it in its queue have ended; a message
    moves when both its ends may start, a sum over the replicas when it may in each. `barriers` are those of the hosts of one replica.
    """
    replicas = range(min(schedule.num_replicas, 2))
    ended: list[set[Op]] = [set() for _ in replicas]
    before = dict(predecessors(schedule))

    def may_start(replica: int) -> Iterator[Op]:
        for launched, stops in zip(order, barriers):
            for number, op in enumerate(launched):
                if replica == 0 and number in stops and not ended[0].issuperset(launched[:number]):
                    break
                awaited = (*schedule.waits.get(op, ()), *before.get(op, ()))
                if op not in ended[replica] and ended[replica].issuperset(awaited):
                    yield op

    def moves(op: Op, replica: int) -> bool:
        if op.kind.row.lane not in TRANSFER_LANES:
            return True
        return all(op in one for one in there) if op.is_replica_allreduce else partner_of(op) in there[replica]

    while True:
        there = [set(may_start(replica)) for replica in replicas]
        moving = [{op for op in there[replica] if moves(op, replica)} for replica in replicas]
        if not any(moving):
            return min(map(len, ended)) < sum(map(len, order))
        for replica in replicas:
            ended[replica] |= moving[replica]


def places_where_one_host_hangs_all(schedule: Schedule) -> int:
    order = schedule.launch_order or launched_early(schedule)
    nobody: list[set[int]] = [set() for _ in order]
    return sum(
        hangs(schedule, order, [*nobody[:rank], {number}, *nobody[rank + 1 :]])
        for rank, own in enumerate(order)
        for number in range(len(own))
    )


@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
def test_receives_ahead_hang_where_a_host_waits_for_its_device(family: str) -> None:
    """What a host launches that goes by waits and queues alone: a receive is there long before the send that its peer needs."""
    schedule = make_schedule(family, num_stages=2, num_microbatches=4, recompute="never")
    assert places_where_one_host_hangs_all(schedule) > 0
    assert places_where_one_host_hangs_all(for_device(schedule)) == 0


def sound(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def holds(schedule: Schedule, costs: Costs, seed: int) -> None:
    if not sound(schedule):
        return
    device = for_device(schedule)
    check(device)
    never_hangs(device, random.Random(seed))
    memory_is_free(device)
    bounds_hold_as_launched(device)
    receives_delay_nothing(schedule, device, costs)


def never_hangs(schedule: Schedule, source: random.Random) -> None:
    """Whichever hosts wait for their devices, and wherever."""
    order = schedule.launch_order
    for often in (0.02, 0.2, 1.0):
        barriers = [{number for number in range(len(own)) if source.random() < often} for own in order]
        assert not hangs(schedule, order, barriers), barriers


def memory_is_free(schedule: Schedule) -> None:
    """When R is launched, all that its host has launched of B, or I and W, comes before it on the device."""
    before = dict(predecessors(schedule))
    ancestors: dict[Op, set[Op]] = {}
    for launched in schedule.launch_order:
        for op in launched:
            awaited = (*schedule.waits.get(op, ()), *before.get(op, ()))
            ancestors[op] = set(awaited).union(*(ancestors[other] for other in awaited))
        for number, op in enumerate(launched):
            if op.kind is Kind.R:
                readers = {other for other in launched[:number] if other.kind in (Kind.B, Kind.I, Kind.W)}
                assert readers <= ancestors[op], op


def bounds_hold_as_launched(schedule: Schedule) -> None:
    """The sets and stashes that a host holds which launches all at once are within what `alive` says of any timing."""
    places, stashes = [0] * schedule.num_stages, [0] * schedule.num_stages
    peaks, most = peak_sets(schedule), peak_stash(schedule)
    for launched in schedule.launch_order:
        for op in launched:
            stage = op.stage
            stashes[stage] += op.kind is Kind.F and stage >= schedule.first_backward
            places[stage] += places_taken(schedule, op)  # a place is for a set, or for a part of one
            assert places[stage] <= peaks[stage].places
            assert stashes[stage] <= most[stage]
            places[stage] -= places_freed(schedule, op)
            stashes[stage] -= ends_stash(op)


def receives_delay_nothing(schedule: Schedule, device: Schedule, costs: Costs) -> None:
    """With the waits that receives get, every other op starts and ends when it did."""
    receives = {op: device.waits[op] for op in device.waits if op.kind.row.lane is Lane.RECV}
    later = dataclasses.replace(schedule, waits={**schedule.waits, **receives})
    ran = {event.op: event for event in simulate(later, costs).events}
    for event in simulate(schedule, costs).events:
        if event.lane is not Lane.RECV:
            assert ran[event.op] == event


SMALL = random_schedules(max_ranks=4, max_microbatches=4)


def put_off(device: Schedule, source: random.Random, often: float) -> Schedule:
    """A schedule of a device, of which ranks launch some ops as late as waits and queues let them."""
    before, order = dict(predecessors(device)), []
    for launched in device.launch_order:
        late = {op for op in launched if source.random() < often}
        for op in launched:
            late |= {op} if late.intersection((*device.waits.get(op, ()), *before.get(op, ()))) else set()
        order.append((*(op for op in launched if op not in late), *(op for op in launched if op in late)))
    return dataclasses.replace(device, launch_order=tuple(order))


@examples(30, 100, SMALL, st.integers(0, 1 << 16))
def test_check_accepts_a_launch_order_if_and_only_if_no_wait_of_hosts_hangs(
    drawn: tuple[Schedule, Costs], seed: int
) -> None:
    """Waits of all hosts before each op are the worst: whoever waits less often gets at least as far."""
    if not sound(drawn[0]):
        return
    source = random.Random(seed)
    for often in (0.02, 0.1, 0.1, 0.3):
        device = put_off(for_device(drawn[0]), source, often)
        hang = hangs(device, device.launch_order, [set(range(len(own))) for own in device.launch_order])
        assert any(each_op_is_launched(device)) is False
        assert any(launched_in_one_order(device)) == hang


@examples(30, 500, SMALL, st.integers(0, 1 << 16))
def test_what_check_accepts_is_launched_soundly(drawn: tuple[Schedule, Costs], seed: int) -> None:
    holds(*drawn, seed)


FAMILIES = [("gpipe", 4, 4), ("gpipe", 6, 3), ("1f1b", 4, 4), ("interleaved", 8, 4), ("inference", 4, 4)]


@pytest.mark.parametrize(("family", "stages", "ranks"), FAMILIES)
@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_step_takes_as_long_as_without_the_waits_of_devices(
    family: str, stages: int, ranks: int, mode: str, ahead: int
) -> None:
    schedule = make_schedule(
        family, num_stages=stages, num_ranks=ranks, num_microbatches=8, recompute=mode, transport_ahead=ahead
    )
    device = for_device(schedule)
    for hop in (0.0, 0.25, 1.0):
        costs = Costs.spread(stages, hop=hop)
        assert simulate(device, costs).step_seconds == pytest.approx(simulate(schedule, costs).step_seconds, rel=1e-9)


@pytest.mark.parametrize(("family", "stages", "ranks", "most"), [("1f1b", 4, 4, 3), ("interleaved", 4, 2, 3)])
def test_results_not_yet_sent_are_as_many_for_any_number_of_microbatches(
    family: str, stages: int, ranks: int, most: int
) -> None:
    for microbatches in (8, 24):
        made = make_schedule(family, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches)
        assert max(most_held_for_sends(for_device(made)).values()) == most


@pytest.mark.parametrize(("microbatches", "outputs", "gradients"), [(6, 4, 3), (12, 8, 5), (24, 16, 9)])
def test_of_gpipe_with_a_last_stage_that_alternates_unsent_results_grow(
    microbatches: int, outputs: int, gradients: int
) -> None:
    """F of the stage before it is three times as fast as its receiver, whose gradients nobody receives meanwhile: 2/3 m and m/3 + 1."""
    held = most_held_for_sends(for_device(make_schedule("gpipe", num_stages=4, num_microbatches=microbatches)))
    assert held.pop((2, Kind.SEND_F)) == outputs
    assert held.pop((3, Kind.SEND_B)) == gradients
    assert set(held.values()) == {3}


def test_an_r_that_waits_for_a_message_waits_for_what_frees_its_memory_too() -> None:
    """No family makes one. 1R3 waits for the gradient of microbatch 3, behind which 1B1 is launched."""
    made = make_schedule(num_stages=3, num_microbatches=4, recompute=RecomputePolicy(sets=3, keep="none"))  # type: ignore[arg-type]
    first, last = Op.parse("1R2"), Op.parse("1RECV_B2")
    waiting = dataclasses.replace(made, waits={**made.waits, first: (*made.waits[first], last)})
    check(waiting)
    device = for_device(waiting)
    check(device)
    added = set(device.waits[first]) - set(waiting.waits[first])
    assert {op.kind for op in added} == {Kind.B}
    memory_is_free(device)
    without = dataclasses.replace(device, waits={**device.waits, first: waiting.waits[first]})
    with pytest.raises(
        ScheduleError, match=r"1R2: is launched after 1B\d, but the device may run it before 1B\d has ended"
    ):
        check(without)
