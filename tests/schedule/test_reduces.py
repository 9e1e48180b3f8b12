"""Gradients are added up over replicas, and by stages that share a parameter: which ops, when, in which order, proved, simulated, bounded and drawn."""

from __future__ import annotations

import dataclasses
import json

import pytest
from examples import examples
from random_schedules import Case, cases
from spelled import reduces, with_words

from pipetrain.monitor.breakdown import break_down
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.draw.terminal import legend, staircase
from pipetrain.monitor.shown import chrome_trace, show_schedule
from pipetrain.plan.plan import make_plan
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import Generator, Shape
from pipetrain.schedule.kinds import REDUCING, Kind
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule, with_first_backward
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.reduce import gradients_of, with_reduces
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

THREE_PARTS = RecomputePolicy("inline", segments=3, last_stage="always")  # type: ignore[arg-type]


def of_replicas(family: str | Generator = "1f1b", num_stages: int = 2, **options: object) -> Schedule:
    defaults = {"num_microbatches": 3, "num_replicas": 4}
    return make_schedule(family, num_stages=num_stages, **{**defaults, **options})  # type: ignore[arg-type]


def four(family: str = "1f1b", **options: object) -> Schedule:
    """Four stages, of which the first and the last share a parameter."""
    return make_schedule(family, num_stages=4, num_microbatches=3, **{"tied": [(0, 3)], **options})  # type: ignore[arg-type]


def in_own_order(_: Shape) -> list[list[Op]]:
    """Set 0 comes back in two parts, set 1 is kept and goes back as a whole."""
    return [[Op.parse(op) for op in ["0F0", "0F1", "0R0.1", "0B0.1", "0R0.0", "0B0.0", "0B1"]]]


WANTED = {
    "1f1b": (of_replicas(), [["0REDUCE_GRAD.0 <- 0B2"], ["1REDUCE_GRAD.0 <- 1B2"]]),
    "auto": (of_replicas("auto"), [["0REDUCE_GRAD.0 <- 0B2"], ["1REDUCE_GRAD.0 <- 1B2"]]),
    "halves": (of_replicas("zb-h1"), [["0REDUCE_GRAD.0 <- 0W2"], ["1REDUCE_GRAD.0 <- 1W2"]]),
    "the stage that is done first goes first": (
        of_replicas("interleaved", 4, num_ranks=2),
        [
            ["2REDUCE_GRAD.0 <- 2B2", "0REDUCE_GRAD.0 <- 0B2"],
            ["3REDUCE_GRAD.0 <- 3B2", "1REDUCE_GRAD.0 <- 1B2"],
        ],
    ),
    "a bucket for each part, the last first": (
        of_replicas(recompute=THREE_PARTS),
        [
            [f"{stage}REDUCE_GRAD.{part} <- {stage}B2.{part}" for part in (2, 1, 0)]
            for stage in (0, 1)
        ],
    ),
    "a kept set, too, where it goes back last": (
        of_replicas(recompute=RecomputePolicy("inline", sets=1, segments=2), num_microbatches=2),  # type: ignore[arg-type]
        [[f"{stage}REDUCE_GRAD.{part} <- {stage}B1.{part}" for part in (1, 0)] for stage in (0, 1)],
    ),
    "a kept set that a schedule of one's own takes back whole, last": (
        of_replicas(in_own_order, 1, num_microbatches=2, recompute=RecomputePolicy("inline", sets=1.5, segments=2)),  # type: ignore[arg-type]
        [["0REDUCE_GRAD.1 <- 0B1", "0REDUCE_GRAD.0 <- 0B1"]],
    ),
    "nothing is recomputed": (
        of_replicas(recompute=RecomputePolicy("never", segments=2)),  # type: ignore[arg-type]
        [[f"{stage}REDUCE_GRAD.{part} <- {stage}B2.{part}" for part in (1, 0)] for stage in (0, 1)],
    ),
    "parameters of two stages, after those of one": (
        of_replicas(tied=[(0, 1)]),
        [
            ["0REDUCE_GRAD.0 <- 0B2", "0REDUCE_GRAD.0>1 <- 0B2"],
            ["1REDUCE_GRAD.0 <- 1B2", "1REDUCE_GRAD.0>0 <- 1B2"],
        ],
    ),
    "shared": (four("gpipe"), [["0REDUCE_GRAD.0>3 <- 0B2"], [], [], ["3REDUCE_GRAD.0>0 <- 3B2"]]),
    "shared, halves": (four("zb-h1"), [["0REDUCE_GRAD.0>3 <- 0W2"], [], [], ["3REDUCE_GRAD.0>0 <- 3W2"]]),
    "shared, two stages per rank": (four("interleaved", num_ranks=2), [["0REDUCE_GRAD.0>3 <- 0B2"], ["3REDUCE_GRAD.0>0 <- 3B2"]]),
    "shared by stages of one rank": (four("zbv", num_ranks=2, placement="v"), [[], []]),
    "shared with a frozen stage": (four("gpipe", first_backward=1), [[], [], [], []]),
    "shared by several pairs": (
        four(tied=[(1, 2), (0, 3), (0, 1)]),
        [
            ["0REDUCE_GRAD.1>3 <- 0B2", "0REDUCE_GRAD.2>1 <- 0B2"],
            ["1REDUCE_GRAD.0>2 <- 1B2", "1REDUCE_GRAD.2>0 <- 1B2"],
            ["2REDUCE_GRAD.0>1 <- 2B2"],
            ["3REDUCE_GRAD.1>0 <- 3B2"],
        ],
    ),
    "frozen stages": (of_replicas(first_backward=1), [[], ["1REDUCE_GRAD.0 <- 1B2"]]),
    "forwards only": (of_replicas("inference"), [[], []]),
    "one replica": (of_replicas(num_replicas=1), [[], []]),
    "one stage": (of_replicas("gpipe", 1), [["0REDUCE_GRAD.0 <- 0B2"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_which_ops_and_what_they_wait_for(name: str) -> None:
    schedule, expected = WANTED[name]
    check(schedule)
    assert reduces(schedule) == expected
    launched = for_device(schedule)
    check(launched)
    assert reduces(launched) == expected


def test_pairs_of_layers_become_pairs_of_stages() -> None:
    plan = make_plan(6, num_ranks=3, balance=[2, 3, 1])
    assert plan.tied_stages([(5, 0), (1, 5), (0, 1), (2, 5)]) == ((1, 2), (0, 2))


def test_the_rest_of_a_schedule_stays_as_it_is() -> None:
    """Whoever knows nothing of a model makes a schedule; its ties come later."""
    made = four(tied=())
    assert with_reduces(made, ()) is made
    assert with_reduces(for_device(made), ((0, 3),)).lanes == with_reduces(made, ((0, 3),)).lanes == four().lanes
    assert with_reduces(made, ((0, 3),)) == four()
    assert all(four().waits[op] == awaited for op, awaited in made.waits.items())
    assert reduces(with_first_backward(four(), 1)) == [[], [], [], []]


def test_the_spelling() -> None:
    assert Op.parse("2REDUCE_GRAD.3") == Op(2, Kind.REDUCE_GRAD, None, 3)
    assert str(Op(2, Kind.REDUCE_GRAD, None, 3)) == "2REDUCE_GRAD.3"
    assert Op.parse("2REDUCE_GRAD.3").is_replica_allreduce
    assert not any(Op.parse(text).is_replica_allreduce for text in ("2REDUCE_GRAD.3>0", "2SEND_F0", "2B1"))


@examples(40, 150, cases(max_ranks=4, max_microbatches=6))
def test_each_bucket_is_added_up_when_it_is_whole_and_in_one_order(case: Case) -> None:
    """Of any family, mode and number of parts."""
    schedule = case.make()
    check(schedule)
    buckets = [op for _, lane, op in schedule.ops() if lane is Lane.REDUCE and op.peer is None]
    trained = range(schedule.first_backward, schedule.num_stages)
    counts = {stage: schedule.policy.num_parts(stage) for stage in trained if schedule.num_replicas > 1}
    assert sorted((op.stage, op.part) for op in buckets) == [(s, part) for s in counts for part in range(counts[s])]
    ended = {event.op: event.end for event in simulate(schedule, case.costs).events}
    for rank in range(schedule.num_ranks):
        own = [op for op in schedule.lane(rank, Lane.REDUCE) if op.peer is None]
        ready = [max(ended[one] for one in gradients_of(schedule, op)) for op in own]
        assert ready == sorted(ready), own
        assert schedule.lane(rank, Lane.REDUCE)[: len(own)] == tuple(own)


def test_a_schedule_that_was_made_without_a_word_of_replicas() -> None:
    made = of_replicas(num_replicas=1, recompute=THREE_PARTS)
    assert with_reduces(made) is made
    several = with_reduces(made, num_replicas=4)
    assert several == of_replicas(recompute=THREE_PARTS)
    assert with_reduces(several, num_replicas=2) == dataclasses.replace(several, num_replicas=2)
    assert with_reduces(several) == made
    assert with_reduces(made, ((0, 1),), 4) == of_replicas(recompute=THREE_PARTS, tied=[(0, 1)])
    assert with_reduces(for_device(made), num_replicas=2).launch_order == ()
    assert reduces(with_first_backward(several, 1))[0] == []


INTERLEAVED = of_replicas("interleaved", 4, num_ranks=2)
PARTS = of_replicas(recompute=THREE_PARTS)
BROKEN = {
    "a part left out": (with_words(PARTS, 0, "0REDUCE_GRAD.2 0REDUCE_GRAD.0"), "0REDUCE_GRAD.1: is missing"),
    "a part too many": (with_words(of_replicas(), 0, "0REDUCE_GRAD.0 0REDUCE_GRAD.1"), "0REDUCE_GRAD.1: is no bucket of 4 replicas"),
    "frozen": (with_words(of_replicas(first_backward=1), 0, "0REDUCE_GRAD.0"), "0REDUCE_GRAD.0: is no bucket of 4 replicas"),
    "other rank": (with_words(with_words(of_replicas(), 0, ""), 1, "0REDUCE_GRAD.0 1REDUCE_GRAD.0"), "the line of rank 1, but stage 0 lives on rank 0"),
    "no bucket": (with_words(of_replicas(), 0, "0REDUCE_GRAD"), "0REDUCE_GRAD: is spelled without a bucket; write 3REDUCE_GRAD.0"),
    "too early": (with_words(of_replicas(), 0, "0REDUCE_GRAD.0", {"0REDUCE_GRAD.0": "0B1"}), "0REDUCE_GRAD.0: does not wait for 0B2"),
    "a part too early": (with_words(PARTS, 0, "0REDUCE_GRAD.2 0REDUCE_GRAD.1 0REDUCE_GRAD.0", {"0REDUCE_GRAD.1": "0B2.2"}), "0REDUCE_GRAD.1: does not wait for 0B2.1"),
    "first stage first": (with_words(INTERLEAVED, 0, "0REDUCE_GRAD.0 2REDUCE_GRAD.0"), "0REDUCE_GRAD.0: stands before 2REDUCE_GRAD.0, which"),
    "shared, left out": (with_words(four(), 0, "", {"0REDUCE_GRAD.0>3": ""}), "0REDUCE_GRAD.0>3: is missing"),
    "unasked": (with_words(four(), 1, "1REDUCE_GRAD.1>2"), "1REDUCE_GRAD.1>2: reduces a parameter that no two stages share"),
    "with itself": (with_words(four(), 1, "1REDUCE_GRAD.0>1"), "1REDUCE_GRAD.0>1: reduces a parameter that no two stages share"),
    "shared, no bucket": (with_words(four(), 1, "1REDUCE_GRAD>2"), "1REDUCE_GRAD>2: is spelled without a bucket"),
    "shared, too early": (with_words(four(), 0, "0REDUCE_GRAD.0>3", {"0REDUCE_GRAD.0>3": "0B1"}), "does not wait for 0B2"),
    "other order of two ranks": (
        with_words(four("gpipe", num_ranks=2, tied=[(0, 3), (0, 1)]), 1, "1REDUCE_GRAD.1>0 3REDUCE_GRAD.0>0"),
        "0REDUCE_GRAD.0>3: meets 1REDUCE_GRAD.1>0",
    ),
    "a backward waits for a shared sum": (with_words(four(), 3, "3REDUCE_GRAD.0>0", {"3B2": "3RECV_F2 3REDUCE_GRAD.0>0"}), "waits for"),
    "a backward waits for the sum": (with_words(of_replicas(), 0, "0REDUCE_GRAD.0", {"0B2": "0RECV_B2 0R2 0REDUCE_GRAD.0"}), "0B2: waits for 0REDUCE_GRAD.0, which waits for 0B2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(name: str) -> None:
    schedule, message = BROKEN[name]
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert message in str(error.value)


def test_ranks_that_wait_for_each_other_in_a_ring() -> None:
    """No two of the three ranks meet in two orders, and yet each waits for the next."""
    ring = make_schedule("gpipe", num_stages=3, num_microbatches=2, tied=[(1, 2), (0, 2), (0, 1)])
    check(ring)
    first = with_words(ring, 0, "0REDUCE_GRAD.1>2 0REDUCE_GRAD.2>1")
    second = with_words(first, 1, "1REDUCE_GRAD.2>0 1REDUCE_GRAD.0>2")
    check(with_words(second, 2, "2REDUCE_GRAD.1>0 2REDUCE_GRAD.0>1"))
    with pytest.raises(ScheduleError, match=r"There is no deadlock.*\n.*REDUCE_GRAD.*which waits for"):
        check(with_words(second, 2, "2REDUCE_GRAD.0>1 2REDUCE_GRAD.1>0"))


def test_number_of_replicas() -> None:
    with pytest.raises(ValueError, match=r"parallel.num_replicas=0: at least 1"):
        of_replicas(num_replicas=0)


def ends(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, float]]:
    events = simulate(schedule, costs).events
    return {str(event.op): (event.start, event.end) for event in events if event.op.kind in REDUCING}


def test_what_it_costs() -> None:
    """GPipe of 2 stages, F 1, B 2: the last B of stage 1 ends at 8, that of stage 0 at 9, and so does the step.

    0  F0 F1 F2 . B0 . B1 . B2          step 12
    1     F0 B0 F1 B1 F2 B2
    """
    never = {"recompute": "never"}
    alone = of_replicas("gpipe", num_replicas=1, **never)
    assert simulate(alone, Costs.spread(2)).step_seconds == 12
    schedule = of_replicas("gpipe", **never)
    assert ends(schedule, Costs.spread(2, reduce=[0, 2])) == {"0REDUCE_GRAD.0": (12, 12), "1REDUCE_GRAD.0": (10, 12)}
    hidden = Costs.spread(2, reduce=[0, 2])
    assert simulate(schedule, hidden).step_seconds == 12 == bound_of(schedule, hidden)
    blocking = Costs.spread(2, reduce=4)
    assert ends(schedule, blocking) == {"0REDUCE_GRAD.0": (12, 16), "1REDUCE_GRAD.0": (10, 14)}
    assert simulate(schedule, blocking).step_seconds == 16 == bound_of(schedule, blocking)


def test_parts_hide_all_but_the_last() -> None:
    """Three equal parts of B=3 and a reduce of 3: each part's second lies under the B of the part before it, but for that of part 0."""
    schedule = of_replicas("gpipe", 1, num_microbatches=1, recompute=RecomputePolicy("never"))
    parts = of_replicas(
        "gpipe",
        1,
        num_microbatches=1,
        recompute=RecomputePolicy("inline", sets=1 / 3, segments=3),  # type: ignore[arg-type]
    )
    costs = Costs.spread(1, backward=3, recompute=0, reduce=3)
    assert simulate(schedule, costs).step_seconds == 1 + 3 + 3
    assert ends(parts, costs) == {
        "0REDUCE_GRAD.2": pytest.approx((2, 3)),
        "0REDUCE_GRAD.1": pytest.approx((3, 4)),
        "0REDUCE_GRAD.0": pytest.approx((4, 5)),
    }
    assert simulate(parts, costs).step_seconds == pytest.approx(5) == bound_of(parts, costs)


def test_by_layers_and_one_after_the_other() -> None:
    """Of 1 and 3 layers the parts take a quarter and three; the lane is one link."""
    policy = RecomputePolicy("inline", sets=0.5, segments=2, parts=((1, 3),))  # type: ignore[arg-type]
    schedule = of_replicas("gpipe", 1, num_microbatches=1, recompute=policy)
    costs = Costs.spread(1, backward=4, recompute=0, reduce=8)
    assert ends(schedule, costs) == {"0REDUCE_GRAD.1": (4, 10), "0REDUCE_GRAD.0": (10, 12)}
    assert simulate(schedule, costs).step_seconds == 12 == bound_of(schedule, costs)


def test_what_two_stages_share_costs_apart() -> None:
    schedule = of_replicas("gpipe", tied=[(0, 1)], recompute="never")
    costs = dataclasses.replace(Costs.spread(2, reduce=2), reduce_shared=(1.0, 5.0))
    found = ends(schedule, costs)
    assert found["0REDUCE_GRAD.0"] == (12, 14)
    assert found["0REDUCE_GRAD.0>1"] == (14, 19)
    assert simulate(schedule, costs).step_seconds == 19 == bound_of(schedule, costs)
    assert ends(schedule, Costs.spread(2, reduce=2))["0REDUCE_GRAD.0>1"] == (14, 16)


def test_what_two_stages_share_costs() -> None:
    """The last stage is done earlier, and its end of the sum lies under the other stages' way back; the rest comes at the end."""
    costs = Costs.spread(4, reduce=[2, 0, 0, 5])
    shared, alone = (simulate(four("gpipe", tied=tied, recompute="never"), costs) for tied in ([(0, 3)], []))
    assert alone.step_seconds == 18
    assert shared.step_seconds == 18 + 5 == bound_of(four("gpipe", recompute="never"), costs)
    events = {str(event.op): (event.start, event.end) for event in shared.events if event.lane is Lane.REDUCE}
    assert events == {"0REDUCE_GRAD.0>3": (18, 23), "3REDUCE_GRAD.0>0": (12, 23)}
    for rank in break_down(four("gpipe", recompute="never"), shared):
        assert rank.busy_seconds + rank.bubble_seconds == 23
    in_between = four("gpipe", tied=[(1, 2)], recompute="never")
    assert simulate(in_between, Costs.spread(4, reduce=1)).step_seconds == 18  # hidden under the way back of stage 0
    assert simulate(in_between, Costs.spread(4, reduce=5)).step_seconds == 16 + 5
    assert bound_of(in_between, Costs.spread(4, reduce=5)) <= 21


def test_it_is_drawn_at_the_foot_of_its_rank() -> None:
    picture = svg(show_schedule(four("gpipe"), Costs.spread(4, reduce=5)))
    lines = [line for line in picture.splitlines() if 'class="reduce"' in line]
    assert ["0REDUCE_GRAD.0>3" in lines[0], "3REDUCE_GRAD.0>0" in lines[1], len(lines)] == [True, True, 2]
    assert "REDUCE_GRAD gradients added up" in picture
    assert 'class="reduce"' not in svg(show_schedule(four("gpipe", tied=())))


def test_it_is_drawn_where_a_rank_computes_nothing() -> None:
    """0  F0 F1 F2 . B0 . B1 . B2 and its sum; stage 1 is done earlier."""
    schedule = of_replicas("gpipe", recompute="never")
    shown = show_schedule(schedule, Costs.spread(2, reduce=3))
    assert shown.title == "gpipe, never: 4 replicas of 2 stages x 3 microbatches"
    rows = staircase(shown.timeline, width=53).splitlines()
    assert rows == [
        "rank 0 F0-F1-F2-...B0====...B1====...B2====%%%%%%%%%"[:52],
        "rank 1 ...F0-B0====F1-B1====F2-B2====%%%%%%%%%......"[:52],
    ]
    assert legend([Kind.F, Kind.REDUCE_GRAD]) == "F- forward  %% gradients added up  . idle"
    assert max(rank.reduce_exposed_seconds for rank in shown.breakdown) == 3
    picture = svg(shown)
    assert sum('class="reduce"' in line for line in picture.splitlines()) == 2
    events = json.loads(chrome_trace(shown.timeline))["traceEvents"]
    assert {"0REDUCE_GRAD.0", "1REDUCE_GRAD.0"} <= {event["name"] for event in events}
