"""Given schedules and generators of one's own: what is made of them, and what is refused before anything runs."""

from __future__ import annotations

import pytest

from pipetrain.schedule.check import check
from pipetrain.schedule.families import Shape
from pipetrain.schedule.make import make_schedule, with_first_backward
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule

SHAPES = {
    "gpipe": {"num_stages": 4},
    "1f1b": {"num_stages": 4, "warmup": 6},
    "interleaved": {"num_stages": 4, "num_ranks": 2},
    "gpipe on v": {"num_stages": 4, "num_ranks": 2, "placement": "v"},
}


def made(name: str, **more: object) -> Schedule:
    return make_schedule(name.split()[0], **{"num_microbatches": 5, **SHAPES[name], **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_given_schedule_without_the_stages_that_need_no_gradient(name: str, mode: str) -> None:
    given = made(name, recompute=mode)
    for first_backward in range(1, 5):
        fewer = with_first_backward(given, first_backward)
        check(fewer)
        for rank, lanes in enumerate(given.lanes):
            for lane in (Lane.COMPUTE, Lane.RECOMPUTE):
                left = [op for op in lanes.get(lane, ()) if op.kind is Kind.F or op.stage >= first_backward]
                assert list(fewer.lane(rank, lane)) == left
        assert not [op for _, _, op in fewer.ops() if op.kind is Kind.SEND_B and op.stage <= first_backward]


@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
def test_it_is_the_schedule_made_for_those_stages(mode: str) -> None:
    policy = RecomputePolicy(mode, last_stage="always")  # type: ignore[arg-type]
    for name in ("gpipe", "1f1b"):
        given = made(name, recompute=policy, transport_ahead=1)
        for first_backward in range(5):
            wanted = made(name, recompute=policy, transport_ahead=1, first_backward=first_backward)
            assert with_first_backward(given, first_backward) == wanted


def test_a_backward_that_a_schedule_lacks_is_not_made_up() -> None:
    with pytest.raises(ValueError, match=r"runs B from stage 2 on.*give a schedule made with first_backward=1"):
        with_first_backward(made("gpipe", first_backward=2), 1)


def strangely(*texts: str) -> object:
    """A generator whose first lane begins with these ops."""

    def strange(shape: Shape) -> list[list[Op]]:
        ops = [
            Op(stage, kind, i) for stage in (0, 1) for i in range(shape.num_microbatches) for kind in (Kind.F, Kind.B)
        ]
        return [[*map(Op.parse, texts), *(op for op in ops if op.stage == rank)] for rank in range(2)][
            : shape.num_ranks
        ]

    return strange


BAD_OPS = {
    "7F0": "generator strange, rank 0: 7F0 is of stage 7; allowed are 0 to 1 (pipeline.num_stages=2)",
    "0B9": "generator strange, rank 0: 0B9 is of microbatch 9; allowed are 0 to 2 (pipeline.num_microbatches=3)",
    "1F0": "generator strange, rank 0: 1F0 stands in the line of rank 0, but stage 1 lives on rank 1",
    "0SEND_F0": "generator strange, rank 0: 0SEND_F0 is no op of a compute lane",
    "0REDUCE_GRAD.0": "generator strange, rank 0: 0REDUCE_GRAD.0 is no op of a compute lane",
    "0R0.1": "generator strange, rank 0: 0R0.1 is no op of a compute lane",
}


@pytest.mark.parametrize("text", BAD_OPS)
def test_ops_that_a_generator_may_not_give(text: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_schedule(strangely(text), num_stages=2, num_microbatches=3)  # type: ignore[arg-type]
    assert BAD_OPS[text] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_generator_gives_a_lane_per_rank_and_ops() -> None:
    with pytest.raises(ValueError, match="generator <lambda>: gave 1 lanes; allowed is one per rank, which makes 2"):
        make_schedule(lambda _: [[]], num_stages=2, num_microbatches=3)
    with pytest.raises(ValueError, match="generator <lambda>, rank 0: 0F0 is no Op"):
        make_schedule(lambda _: [["0F0"]], num_stages=1, num_microbatches=1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"pipeline.schedule=5: give the name of a family, a path"):
        make_schedule(5, num_stages=1, num_microbatches=1)  # type: ignore[arg-type]
