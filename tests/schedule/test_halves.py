"""Where the pass of `pipeline.split_backward` puts each W, and what that brings."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from random_schedules import Case, cases
from shows import show

from pipetrain.monitor.draw.terminal import staircase
from pipetrain.monitor.shown import Shown
from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import ALWAYS_SPLIT, ComputeLanes, Shape, gpipe
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.recompute import AllKept
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

THIRDS = {"forward": 1, "backward": 2, "recompute": 1}


def halved(family: str, stages: int, microbatches: int, policy: str | RecomputePolicy = "never", **more: Any) -> Shown:
    costs = Costs.spread(stages, **THIRDS)
    numbers = {"num_stages": stages, "num_microbatches": microbatches, "costs": costs, "split_backward": True}
    return show(family, **{**numbers, **more}, recompute=policy)


STAIRCASES = {
    ("gpipe", "never", 1): """
rank 0 F0-F1-F2-F3-......I0<I1<W0+I2<W1+I3<W2+W3+
rank 1 ...F0-F1-F2-F3-I0<I1<W0+I2<W1+I3<W2+W3+...
rank 2 ......F0-I0<F1-I1<F2-I2<F3-I3<W0+W1+W2+W3+
""",
    ("1f1b", "never", 1): """
rank 0 F0-F1-F2-......I0<W0+F3-I1<W1+I2<W2+I3<W3+
rank 1 ...F0-F1-...I0<F2-I1<W0+F3-I2<W1+I3<W2+W3+
rank 2 ......F0-I0<F1-I1<F2-I2<W0+F3-I3<W1+W2+W3+
""",
    ("1f1b", "inline", 1): """
rank 0 F0-F1-F2-.........R0~I0<W0+F3-R1~I1<W1+...R2~I2<W2+R3~I3<W3+
rank 1 ...F0-F1-...R0~I0<W0+F2-R1~I1<W1+F3-R2~I2<W2+R3~I3<W3+......
rank 2 ......F0-I0<W0+F1-I1<W1+F2-I2<W2+...F3-I3<W3+...............
""",
    ("1f1b", "overlap", 1): """
rank 0 F0-F1-F2-R0~...I0<W0+F3-R1~I1<W1+R2~...I2<W2+R3~I3<W3+
rank 1 ...F0-F1-R0~I0<W0+F2-R1~I1<W1+F3-R2~I2<W2+R3~I3<W3+...
rank 2 ......F0-I0<W0+F1-I1<W1+F2-I2<W2+F3-I3<W3+............
""",
    ("1f1b", "overlap", 2): """
rank 0 F0-F1-F2-......I0<W0+F3-I1<W1+R2~I2<W2+I3<W3+
rank 1 ...F0-F1-...I0<W0+F2-I1<W1+F3-I2<W2+I3<W3+...
rank 2 ......F0-I0<F1-I1<W0+F2-I2<W1+F3-I3<W2+W3+...
""",
    ("1f1b", "early", 2): """
rank 0 F0-F1-F2-......I0<W0+F3-I1<W1+R2~I2<W2+I3<W3+
rank 1 ...F0-F1-...I0<W0+F2-I1<W1+F3-I2<W2+I3<W3+...
rank 2 ......F0-I0<F1-I1<W0+F2-I2<W1+F3-I3<W2+W3+...
""",
}


@pytest.mark.parametrize("case", STAIRCASES, ids=lambda case: "-".join(map(str, case)))
def test_staircase(case: tuple[str, str, int]) -> None:
    family, mode, sets = case
    shown = halved(family, 3, 4, RecomputePolicy(mode, sets=sets))  # type: ignore[arg-type]
    assert "\n" + staircase(shown.timeline) + "\n" == STAIRCASES[case]


# p, m, K and the step in units of f: whole, in halves
FIGURES = [
    ("1f1b", 8, 16, "never", 1, 69, 55),
    ("1f1b", 8, 8, "overlap", 2, 47, 39),
    ("1f1b", 4, 16, "overlap", 1, 71, 68),
    ("gpipe", 4, 16, "overlap", 1, 70, 68),
    ("gpipe", 4, 8, "inline", 1, 40, 38),
]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: "-".join(map(str, figure[:5])))
def test_figures(figure: tuple[str, int, int, str, int, float, float]) -> None:
    family, stages, microbatches, mode, sets, whole, in_halves = figure
    policy = RecomputePolicy(mode, sets=sets)  # type: ignore[arg-type]
    assert halved(family, stages, microbatches, policy, split_backward=False).step_seconds == whole
    assert halved(family, stages, microbatches, policy).step_seconds == in_halves


def test_without_recomputation_no_stage_holds_more_than_the_one_that_has_most() -> None:
    """Put off to the end, W would hold all eight microbatches of the last stage."""
    for family, most in (("1f1b", 4), ("gpipe", 8)):
        whole = make_schedule(family, num_stages=4, num_microbatches=8, recompute="never")
        shown = halved(family, 4, 8)
        assert max(peak_stash(whole)) == max(peak_stash(shown.schedule)) == most
    assert halved("1f1b", 4, 8).step_seconds == 8 * 3 + 3  # what ZB-H1 takes
    less = halved("1f1b", 4, 8, RecomputePolicy(Mode.NEVER, stash=(4, 3, 2, 2)))
    assert peak_stash(less.schedule) == (4, 3, 2, 2)
    assert less.step_seconds > 27


def test_unequal_costs_move_w() -> None:
    """A slow stage has no waits: its W stay where they are as long as others wait for it."""
    costs = Costs.spread(3, forward=[1, 1, 2], backward=[2, 2, 4])
    shown = halved("1f1b", 3, 6, costs=costs)
    assert shown.step_seconds < halved("1f1b", 3, 6, costs=costs, split_backward=False).step_seconds
    assert shown.step_seconds == shown.bound_seconds


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", Mode)
def test_several_stages_per_rank(mode: Mode, ranks: int) -> None:
    for family, placement in (("interleaved", "loop"), ("gpipe", "v"), ("gpipe", "loop")):
        more = {"num_ranks": ranks, "placement": placement}
        whole = halved(family, 4, 6, RecomputePolicy(mode), split_backward=False, **more)
        assert halved(family, 4, 6, RecomputePolicy(mode), **more).step_seconds <= whole.step_seconds


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved"])
def test_there_and_back(family: str, mode: Mode, tmp_path: Path) -> None:
    numbers = {"num_stages": 4, "num_ranks": 2 if family == "interleaved" else 4, "num_microbatches": 6}
    schedule = make_schedule(family, **numbers, recompute=RecomputePolicy(mode, sets=2), split_backward=True)
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(schedule))
    again = make_schedule(str(path), **numbers, recompute=schedule.policy)
    assert dataclasses.replace(again, family=family) == schedule
    with pytest.raises(
        ValueError, match=r"mine\.csv says itself where I and W are; leave out pipeline\.split_backward"
    ):
        make_schedule(str(path), **numbers, split_backward=True)


def test_a_file_or_a_generator_of_whole_backwards_is_split_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    numbers = {"num_stages": 3, "num_microbatches": 4, "recompute": "overlap", "split_backward": True}
    path.write_text(write_csv(make_schedule("1f1b", num_stages=3, num_microbatches=4, recompute="never")))
    halves = make_schedule("1f1b", **numbers)
    assert dataclasses.replace(make_schedule(str(path), **numbers), family="1f1b") == halves


def test_no_room_at_all_is_named() -> None:
    def keeping_all(shape: Shape) -> ComputeLanes:
        return AllKept(gpipe(shape))

    with pytest.raises(
        ScheduleError, match=r"stage 0 can have 4 sets alive at once, but only 1 activation slot; use recompute.sets=4"
    ):
        check(make_schedule(keeping_all, num_stages=3, num_microbatches=4, split_backward=True))


def test_forwards_only_have_nothing_to_split() -> None:
    kinds = {
        op.kind for _, _, op in make_schedule("inference", num_stages=3, num_microbatches=4, split_backward=True).ops()
    }
    assert not kinds & {Kind.B, Kind.I, Kind.W}


def in_order(schedule: Schedule, kind: Kind) -> bool:
    """Whether each stage runs its ops of `kind` in microbatch order, so that gradients are summed as in one process."""
    for stage, rank in enumerate(schedule.stage_ranks):
        ops = [op.microbatch or 0 for op in schedule.lane(rank, Lane.COMPUTE) if (op.stage, op.kind) == (stage, kind)]
        if ops != sorted(ops):
            return False
    return True


@examples(12, 200, cases(with_parts=False))
def test_halves_run_in_microbatch_order_within_their_bounds(case: Case) -> None:
    arguments = {**case.arguments, "split_backward": True}
    if callable(arguments["family"]):
        return
    schedule = dataclasses.replace(case, arguments=arguments).make()
    check(schedule)
    assert in_order(schedule, Kind.I)
    assert in_order(schedule, Kind.W)
    kinds = {op.kind for _, _, op in schedule.ops()}
    assert Kind.B not in kinds
    if schedule.policy.mode is Mode.NEVER and arguments["family"] not in ALWAYS_SPLIT:
        whole = dataclasses.replace(case, arguments={**arguments, "split_backward": False}).make()
        assert max(peak_stash(schedule)) == max(peak_stash(whole))


@examples(40, 200, cases(with_split=False, with_parts=False))
def test_halves_of_a_whole_are_never_slower_without_recomputation(case: Case) -> None:
    """Each W behind its I is one of the orders to choose from, and there the gradient only goes on earlier."""
    arguments = {**case.arguments, "recompute": RecomputePolicy(Mode.NEVER)}
    costs = dataclasses.replace(case.costs, input_gradient=(), weight_gradient=())
    whole = make_schedule(**arguments, costs=costs)
    halves = make_schedule(**arguments, costs=costs, split_backward=True)
    rounding = 1e-9 * (1 + simulate(whole, costs).step_seconds)
    assert simulate(halves, costs).step_seconds <= simulate(whole, costs).step_seconds + rounding


def test_a_w_between_an_inline_r_and_its_i() -> None:
    """Received just in time, a gradient is for the R that waits for it, and the W in between is none of its users."""
    order = ["0F0", "0F1", "0R0", "0I0", "0R1", "0W0", "0I1", "0W1"]

    def lanes(shape: Shape) -> list[list[Op]]:
        last = ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]
        return [list(map(Op.parse, lane)) for lane in (order, last)]

    schedule = make_schedule(
        lanes, num_stages=2, num_microbatches=2, recompute=RecomputePolicy("inline", sets=2), transport_ahead=0
    )
    assert list(map(str, schedule.lane(0, Lane.COMPUTE))) == order
    check(schedule)
    assert simulate(schedule, Costs.spread(2)).step_seconds > 0
