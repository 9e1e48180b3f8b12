"""Where the pass of `pipeline.split_backward` puts each W, and what that brings."""

import dataclasses
from typing import Any

import pytest
from examples import examples
from random_schedules import Case, cases
from shows import show
from spelled import ops

from pipetrain.monitor.draw.terminal import staircase
from pipetrain.monitor.shown import Shown
from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import ALWAYS_SPLIT
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane
from pipetrain.schedule.policy import Mode, RecomputePolicy
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
}


@pytest.mark.parametrize("case", STAIRCASES, ids=lambda case: "-".join(map(str, case)))
def test_staircase(case: tuple[str, str, int]) -> None:
    family, mode, sets = case
    shown = halved(family, 3, 4, RecomputePolicy(mode, sets=sets))  # type: ignore[arg-type]
    assert "\n" + staircase(shown.timeline) + "\n" == STAIRCASES[case]


def test_early_has_the_gaps_of_overlap() -> None:
    early, overlap = (
        halved("1f1b", 3, 4, RecomputePolicy(mode, sets=2)).timeline for mode in (Mode.EARLY, Mode.OVERLAP)
    )
    assert staircase(early) == staircase(overlap)


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


def test_forwards_only_have_nothing_to_split() -> None:
    forwards = make_schedule("inference", num_stages=3, num_microbatches=4, split_backward=True)
    assert not {op.kind for _, _, op in forwards.ops()} & {Kind.B, Kind.I, Kind.W}


def in_order(schedule: Schedule, kind: Kind) -> bool:
    """Whether each stage runs its ops of `kind` in microbatch order, so that gradients are summed as in one process."""
    for stage, rank in enumerate(schedule.stage_ranks):
        own = [op.microbatch or 0 for op in schedule.lane(rank, Lane.COMPUTE) if (op.stage, op.kind) == (stage, kind)]
        if own != sorted(own):
            return False
    return True


@examples(12, 100, cases(with_parts=False))
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


@examples(40, 100, cases(with_split=False, with_parts=False))
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
    lanes = [ops("0F0 0F1 0R0 0I0 0R1 0W0 0I1 0W1"), ops("1F0 1I0 1W0 1F1 1I1 1W1")]
    policy = RecomputePolicy(Mode.INLINE, sets=2)
    schedule = make_schedule(lambda _: lanes, num_stages=2, num_microbatches=2, recompute=policy, transport_ahead=0)
    assert schedule.lane(0, Lane.COMPUTE) == lanes[0]
    check(schedule)
    assert simulate(schedule, Costs.spread(2)).step_seconds > 0
