"""Which rank holds which stage: names, lists, what families do with them, and what is refused."""

import itertools

import pytest
from shows import show

from pipetrain.monitor.draw.terminal import staircase
from pipetrain.schedule.bound import bound
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.placement import spelling_of, stage_ranks_of

NAMED = {
    ("loop", 6, 3): (0, 1, 2, 0, 1, 2),
    ("v", 6, 3): (0, 1, 2, 2, 1, 0),
    ("v", 8, 2): (0, 1, 1, 0, 0, 1, 1, 0),
    ("v", 3, 3): (0, 1, 2),
    ("loop", 3, None): (0, 1, 2),
}


@pytest.mark.parametrize("case", NAMED, ids=str)
def test_names(case: tuple) -> None:
    assert stage_ranks_of(*case) == NAMED[case]


@pytest.mark.parametrize("listed", [[2, 0, 1], [0, 1, 1, 0, 0], (0,)])
def test_a_list_is_what_it_says(listed: list[int]) -> None:
    assert stage_ranks_of(listed, len(listed)) == tuple(listed)


def test_spelling_is_what_the_config_takes() -> None:
    assert [spelling_of(ranks) for ranks in ((0, 1, 0, 1), (0, 1, 1, 0), (1, 0))] == ["loop", "v", "[1, 0]"]


BAD = [
    (("w", 4, 2), "pipeline.placement='w': allowed are loop, v, or a list with the rank of each stage"),
    (("lop", 4, 2), "did you mean 'loop'"),
    (([0, 1], 4, 2), "pipeline.placement=[0, 1] has 2 entries for 4 stages; give the rank of each stage"),
    (([0, 0, 2], 3, None), "pipeline.placement=[0, 0, 2]: rank 1 holds no stage; give each of the ranks 0 to 2 one"),
    (([0, 1, 1], 3, 3), "pipeline.placement=[0, 1, 1]: rank 2 holds no stage"),
    (([0, 1, 5], 3, 2), "pipeline.placement=[0, 1, 5]: there is no rank 5 for stage 2; allowed are 0 to 1"),
    (([0, -1], 2, None), "pipeline.placement=[0, -1]: there is no rank -1 for stage 1; allowed are 0 to 0"),
    (("v", 2, 3), "3 ranks for pipeline.num_stages=2"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_placements(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        stage_ranks_of(*arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_gpipe_there_and_back() -> None:
    even = Costs.spread(4, backward=1)
    shown = show(num_stages=4, num_ranks=2, placement="v", num_microbatches=3, recompute="never", costs=even)
    picture = """
rank 0 0F00F10F2......3F03B03F13B13F23B2......0B00B10B2
rank 1 ...1F01F11F22F02F12F22B0...2B1...2B21B01B11B2...
"""
    assert "\n" + staircase(shown.timeline) + "\n" == picture
    assert shown.title == "gpipe, never: 4 stages on 2 ranks, placed v, x 3 microbatches"


def test_stages_that_meet_on_a_rank_send_nothing() -> None:
    schedule = make_schedule(num_stages=4, num_ranks=2, placement="v", num_microbatches=2)
    messages = {op.stage for lane in (Lane.SEND, Lane.RECV) for op in schedule.lane(1, lane)}
    assert messages == {1, 2}
    assert not [op for op in schedule.lane(1, Lane.SEND) if str(op).startswith(("1SEND_F", "2SEND_B"))]


@pytest.mark.parametrize("mode", ["never", "overlap"])
def test_gpipe_runs_on_any_placement(mode: str) -> None:
    for stages in (3, 4, 5):
        for listed in itertools.product(range(3), repeat=stages):
            if set(listed) == {0, 1, 2}:
                schedule = make_schedule(num_stages=stages, placement=listed, num_microbatches=3, recompute=mode)
                check(schedule)
                assert schedule.stage_ranks == listed


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "inference"])
def test_ranks_in_another_order_take_the_same_time(family: str) -> None:
    costs = Costs.spread(4, forward=[1, 2, 1, 3], hop=0.25)
    for listed in itertools.permutations(range(4)):
        wanted = {"num_stages": 4, "num_microbatches": 5, "costs": costs}
        shown, usual = show(family, placement=listed, **wanted), show(family, **wanted)
        assert shown.step_seconds == usual.step_seconds
        for stage, rank in enumerate(listed):
            assert shown.schedule.lane(rank, Lane.COMPUTE) == usual.schedule.lane(stage, Lane.COMPUTE)


def test_the_bound_knows_what_a_rank_holds() -> None:
    costs = Costs.spread(4, forward=[3, 1, 1, 3], backward=[3, 1, 1, 3])
    outer_together = bound(costs, 4, policy="never", placement="v", num_ranks=2)
    assert outer_together == 4 * 12  # rank 0 has the first stage and the last: no head, no tail
    assert bound(costs, 4, policy="never", placement="loop", num_ranks=2) < outer_together


def test_interleaved_goes_round_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"pipeline.placement=v: .* needs pipeline.placement=loop.*schedule=gpipe"):
        make_schedule("interleaved", num_stages=4, num_ranks=2, placement="v", num_microbatches=4)
    assert make_schedule("interleaved", num_stages=4, placement=[0, 1, 0, 1], num_microbatches=4).num_ranks == 2


def test_1f1b_holds_one_stage_per_rank() -> None:
    with pytest.raises(ValueError, match=r"4 stages on 2 ranks; set pipeline\.schedule=gpipe"):
        make_schedule("1f1b", num_stages=4, num_ranks=2, placement="v", num_microbatches=4)
    first = make_schedule("1f1b", num_stages=3, placement=[2, 0, 1], num_microbatches=4).lane(2, Lane.COMPUTE)
    assert first[:3] == tuple(Op.parse(f"0F{microbatch}") for microbatch in range(3))
