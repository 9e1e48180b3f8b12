"""Each rule of `check` with a schedule that breaks it, and the text of the error."""

import dataclasses
import itertools

import pytest
import spelled

from pipetrain.schedule.check import RULES, ScheduleError, check
from pipetrain.schedule.grid import grid
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule

VALID = make_schedule(num_stages=3, num_microbatches=3)


def edited(rank: int, lane: Lane, *changes: tuple[str, str], schedule: Schedule = VALID) -> Schedule:
    """`schedule` with words replaced in one lane."""
    words = spelled.lane(schedule, rank, lane)
    for old, new in changes:
        assert old in words
        words = words.replace(old, new)
    return spelled.with_words(schedule, rank, words, lane=lane)


def rewaited(op: str, *awaited: str) -> Schedule:
    return dataclasses.replace(VALID, waits={**VALID.waits, Op.parse(op): tuple(map(Op.parse, awaited))})


def three(mode: str = "overlap", num_replicas: int = 1, **policy: object) -> Schedule:
    how = RecomputePolicy(mode, **policy)  # type: ignore[arg-type]
    return make_schedule(num_stages=3, num_microbatches=3, num_replicas=num_replicas, recompute=how)


IN_PARTS = three("inline", segments=3)


def in_parts(*changes: tuple[str, str]) -> Schedule:
    return edited(1, Lane.COMPUTE, *changes, schedule=IN_PARTS)


HALVES = make_schedule("zb-h1", num_stages=3, num_microbatches=3, recompute="never")


def halved(old: str, new: str) -> Schedule:
    return edited(1, Lane.COMPUTE, (old, new), schedule=HALVES)


REPLICAS, ALL_KEPT = three("inline", 2, segments=2), three("never", 2, segments=3)
OFFLOADED = three(offload="always")
LAUNCHED, TWO_PLACES = for_device(VALID), for_device(three(sets=2, keep="none"))


def relaunched(rank: int, old: str, new: str, schedule: Schedule = LAUNCHED) -> Schedule:
    """`LAUNCHED` with words replaced in the launch order of one rank."""
    words = " ".join(map(str, schedule.launch_order[rank]))
    assert old in words
    order = list(schedule.launch_order)
    order[rank] = tuple(Op.parse(word) for word in words.replace(old, new).split())
    return dataclasses.replace(schedule, launch_order=tuple(order))


BROKEN = {
    "each_op_once": (edited(1, Lane.COMPUTE, ("1F1", "1F1 1F1")), "1F1: stands there 2 times"),
    "each_op_in_its_place": (edited(1, Lane.COMPUTE, ("1F1", "0F1")), "stands there 2 times"),
    "rank": (
        edited(0, Lane.COMPUTE, ("0F1", ""), schedule=edited(1, Lane.COMPUTE, ("1F1", "1F1 0F1"))),
        "0F1: stands in the line of rank 1, but stage 0 lives on rank 0",
    ),
    "lane": (
        edited(1, Lane.RECOMPUTE, ("1R1", ""), schedule=edited(1, Lane.COMPUTE, ("1B1", "1R1 1B1"))),
        "1R1: R belongs into the recompute lane, not into compute",
    ),
    "stage": (edited(1, Lane.COMPUTE, ("1F1", "7F1")), "7F1: is of stage 7; allowed are 0 to 2"),
    "microbatch": (edited(1, Lane.COMPUTE, ("1F1", "1F7")), "1F7: is of microbatch 7; allowed are 0 to 2"),
    "form": (
        edited(1, Lane.COMPUTE, ("1F1", "1F1.3")),
        "1F1.3: is no op of a compute lane here: only R, B and copies have parts",
    ),
    "no such part": (in_parts(("1B1.2", "1B1.9")), "1B1.9: is of part 9; stage 1 has parts 0 to 2"),
    "which part": (in_parts(("1R1.2", "1R1")), "1R1: names none of its 3 parts; write which, as in 1R1.0"),
    "a part of b": (in_parts(("1B1.1", "")), "1B1.1: is missing: 1B1.2 needs it"),
    "a part of r": (in_parts(("1R1.1", "")), "1R1.1: is missing: the set is not kept"),
    "parts in order": (in_parts(("1R1.2 1B1.2 1R1.1 1B1.1", "1R1.1 1B1.1 1R1.2 1B1.2")), "does not wait for 1B1.2"),
    "whole b of parts": (
        in_parts(("1R1.2 1B1.2 1R1.1 1B1.1 1R1.0 1B1.0", "1R1.2 1R1.1 1R1.0 1B1")),
        "1B1: its set is recomputed in parts, so B must run in parts too",
    ),
    "a kept set, whole and in parts": (
        edited(1, Lane.COMPUTE, ("1B2.2", "1B2.2 1B2"), schedule=ALL_KEPT),
        "1B2: is extra to 1B2.2 and 1B2.1 and 1B2.0",
    ),
    "places of parts": (
        in_parts(("1R1.2 1B1.2 1R1.1 1B1.1", "1R1.2 1R1.1 1B1.2 1B1.1")),
        "can have 0.666667 sets alive at once, but only 1 activation slot of one part each; use recompute.sets=0.666667, or",
    ),
    "each_forward": (edited(1, Lane.COMPUTE, ("1F1", "")), "1F1: is missing"),
    "each_backward": (edited(1, Lane.COMPUTE, ("1B1", "")), "1B1: is missing"),
    "w without i": (halved("1I1", ""), "1I1: is missing: 1W1 needs it"),
    "i without w": (halved("1W1", ""), "1W1: is missing: 1I1 needs it"),
    "whole and in halves": (
        halved("1I1", "1I1 1B1"),
        "1B1: is extra to 1I1 and 1W1: each microbatch needs exactly one backward: B, B of each part, or I and W",
    ),
    "w before i": (
        edited(1, Lane.COMPUTE, ("1I1", "1I9"), ("1W1", "1I1"), ("1I9", "1W1"), schedule=HALVES),
        "1W1: does not wait for 1I1",
    ),
    "frozen": (dataclasses.replace(VALID, first_backward=1), "0B0: stages below 1 need no gradient"),
    "each_set_kept_or_recomputed": (edited(1, Lane.RECOMPUTE, ("1R1", "")), "1R1: is missing: the set is not kept"),
    "kept": (
        dataclasses.replace(VALID, kept=VALID.kept | {(1, 1)}),
        "1R1: the set is kept, so there is nothing to recompute",
    ),
    "each_message_has_two_ends": (edited(1, Lane.RECV, ("1RECV_F1", "")), "1RECV_F1: is missing"),
    "message": (edited(0, Lane.SEND, ("0SEND_F1", "0SEND_F1 0SEND_B1")), "0SEND_B1: moves a tensor that nobody needs"),
    "each_shared_gradient": (dataclasses.replace(VALID, tied=((0, 2),)), "0REDUCE_GRAD.0>2: is missing"),
    "each_gradient_of_replicas": (dataclasses.replace(VALID, num_replicas=2), "0REDUCE_GRAD.0: is missing"),
    "one replica": (dataclasses.replace(REPLICAS, num_replicas=1), "0REDUCE_GRAD.0: there is one replica"),
    "each_reduce_in_its_turn": (
        edited(0, Lane.REDUCE, ("0REDUCE_GRAD.1 0REDUCE_GRAD.0", "0REDUCE_GRAD.0 0REDUCE_GRAD.1"), schedule=REPLICAS),
        "0REDUCE_GRAD.0: stands before 0REDUCE_GRAD.1, which becomes ready before it",
    ),
    "each_link_in_one_order": (
        edited(1, Lane.RECV, ("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0")),
        "1RECV_F1: meets 0SEND_F0",
    ),
    "each_wait_is_for_an_op": (rewaited("1F0", "1RECV_F0", "9F0"), "1F0: waits for 9F0, which is not in the schedule"),
    "other rank": (rewaited("1F0", "1RECV_F0", "0F0"), "1F0: waits for 0F0, which is of rank 0"),
    "each_op_after_what_it_reads": (rewaited("1F0"), "1F0: does not wait for 1RECV_F0"),
    "set": (rewaited("1B1", "1RECV_B1"), "1B1: does not wait for 1R1"),
    "producer": (rewaited("1SEND_B0"), "1SEND_B0: does not wait for 1B0"),
    "sends of one queue": (rewaited("1SEND_F1", "1F0"), "1SEND_F1: does not wait for 1F1"),
    "receive and r": (rewaited("1RECV_B1", "1R1", "1F2", "1B1"), "which waits for"),
    "unsent output": (rewaited("1F1", "1RECV_F1", "1SEND_F1"), "which waits for"),
    "deadlock_free": (rewaited("0F0", "0RECV_B0"), "which waits for"),
    "each_op_is_launched": (relaunched(1, "1SEND_F1 ", ""), "1SEND_F1: is not launched by rank 1"),
    "launched twice": (relaunched(1, "1SEND_F1 ", "1SEND_F1 1SEND_F1 "), "1SEND_F1: is launched twice"),
    "launched elsewhere": (relaunched(0, "0F1 ", "0F1 1F1 "), "1F1: is launched by rank 0, but is no op of it"),
    "launched before its wait": (relaunched(0, "0F0 0R0", "0R0 0F0"), "0R0: is launched before 0F0"),
    "launched before the op before": (
        relaunched(0, "0F0 0R0 0SEND_F0 0F1", "0F1 0F0 0R0 0SEND_F0"),
        "0F1: is launched before 0F0",
    ),
    "launched_in_one_order": (
        dataclasses.replace(LAUNCHED, launch_order=spelled.launched_early(LAUNCHED)),
        "which waits for",
    ),
    "each_recompute_gets_free_memory": (
        relaunched(
            1,
            "1R1 1RECV_F2 1SEND_F1 1F2 1SEND_F2 1RECV_B0 1B0",
            "1RECV_F2 1SEND_F1 1F2 1SEND_F2 1RECV_B0 1B0 1R1",
            TWO_PLACES,
        ),
        "1R1: is launched after 1B0, but the device may run it before 1B0 has ended",
    ),
    "sets_within_bounds": (
        dataclasses.replace(VALID, waits={op: w for op, w in VALID.waits.items() if str(op) != "1R1"}),
        "does not wait for 1F1",
    ),
    "places": (
        rewaited("1R1", "1F1", "1F2"),
        "stage 1 can have 2 sets alive at once, but only 1 activation slot; use recompute.sets=2, or",
    ),
    "each_copy_comes_back": (
        edited(1, Lane.RELOAD, ("1RELOAD1", ""), schedule=OFFLOADED),
        "1RELOAD1: is missing: 1OFFLOAD1 takes the set to the host",
    ),
    "host_sets_within_bounds": (
        dataclasses.replace(OFFLOADED, policy=RecomputePolicy(offload="always", host_sets=(2, 3, 3))),  # type: ignore[arg-type]
        "0OFFLOAD2: stage 0 can have 3 sets in host memory at once; allowed are 2",
    ),
    "stash_within_bounds": (
        dataclasses.replace(VALID, policy=RecomputePolicy(stash=(3, 2, 1))),
        "1F0: stage 1 holds 3 microbatches between F and B, allowed are 2; use recompute.stash=3, or an order",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_its_op(name: str) -> None:
    schedule, message = BROKEN[name]
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert message in str(error.value)


def test_each_rule_has_one_sentence() -> None:
    for rule in RULES:
        sentence = (rule.__doc__ or "").splitlines()[0]
        assert sentence.endswith(".")
        assert rule.__name__ in BROKEN


def test_keeping_more_than_the_policy_allows() -> None:
    kept = make_schedule(num_stages=3, num_microbatches=4, recompute=RecomputePolicy(sets=3))
    check(kept)
    for fewer, found in ((2, "use recompute.sets=3, or"), ((2, 3, 3), "use recompute.sets=3 for stage 0, or")):
        greedy = dataclasses.replace(kept, policy=RecomputePolicy(sets=fewer))
        with pytest.raises(ScheduleError, match=f"can have 3 sets alive at once, but only 2 activation slots; {found}"):
            check(greedy)
    with pytest.raises(ValueError, match=r"recompute.sets=\[3, 3\] has 2 numbers for 3 stages"):
        check(dataclasses.replace(kept, policy=RecomputePolicy(sets=(3, 3))))


def test_the_error_shows_rule_op_and_grid() -> None:
    with pytest.raises(ScheduleError) as error:
        check(rewaited("1B1", "1RECV_B1"))
    assert str(error.value) == (
        "An op comes after the ops whose results it reads: by the order of its queue, its own wait, or the wait of an op before it.\n"
        "1B1: does not wait for 1R1\n"
        "rank 0  compute   0F0 0F1 0F2 0B0 0B1 0B2\n"
        "rank 1  compute   1F0 1F1 1F2 1B0 [1B1] 1B2\n"
        "        recompute 1R0 1R1 1R2\n"
        "        send      1SEND_F0 1SEND_F1 1SEND_F2 1SEND_B0 1SEND_B1 1SEND_B2\n"
        "        recv      1RECV_F0 1RECV_F1 1RECV_F2 1RECV_B0 1RECV_B1 1RECV_B2\n"
        "rank 2  compute   2F0 2B0 2F1 2B1 2F2 2B2"
    )


def test_a_circle_is_told_op_by_op() -> None:
    with pytest.raises(ScheduleError) as error:
        check(rewaited("0F0", "0RECV_B0"))
    fault = str(error.value).splitlines()[1]
    chain = fault.replace(": waits for ", ", which waits for ").split(", which waits for ")
    assert chain[0] == chain[-1]
    assert {"0F0", "0RECV_B0", "1B0"} <= set(chain)
    assert all(first != second for first, second in itertools.pairwise(chain))


def test_the_grid_is_never_wider_than_asked() -> None:
    schedule = make_schedule(num_stages=8, num_microbatches=64)
    text = grid(schedule, Op.parse("4B30"), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "[4B30]" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank")] == ["2", "3", "4", "5", "6"]


def test_waits_for_messages_and_between_lanes_are_sound() -> None:
    """What bounds unsent outputs, a receive that waits for an R, sends of one queue that wait for different ops."""
    added = {"1F2": "1SEND_F0", "1RECV_B2": "1R1", "1RECV_F1": "1F0", "1SEND_F0": "1F1", "1SEND_B1": "1R2"}
    waits = dict(VALID.waits)
    for op, other in added.items():
        waits[Op.parse(op)] = (*waits.get(Op.parse(op), ()), Op.parse(other))
    check(dataclasses.replace(VALID, waits=waits))
