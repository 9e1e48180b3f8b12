"""The order of each family, as the staircase that its generator shows."""

from typing import Any

import pytest
from shows import show

from pipetrain.monitor.draw.terminal import staircase
from pipetrain.schedule.alive import peak_stash
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import Shape
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy


def drawn(family: str, stages: int, microbatches: int, recompute: str | RecomputePolicy = "never", **more: int) -> str:
    even = Costs.spread(stages, forward=1, backward=1, recompute=1, input_gradient=1, weight_gradient=1)
    shown = show(family, num_stages=stages, num_microbatches=microbatches, recompute=recompute, costs=even, **more)
    return "\n" + staircase(shown.timeline) + "\n"


STAIRCASES = {
    ("gpipe", 3, 3, "never"): """
rank 0 F0-F1-F2-......B0-...B1-...B2-
rank 1 ...F0-F1-F2-B0-...B1-...B2-...
rank 2 ......F0-B0-F1-B1-F2-B2-......
""",
    ("gpipe", 3, 3, "inline"): """
rank 0 F0-F1-F2-.........R0~B0-R1~B1-R2~B2-
rank 1 ...F0-F1-F2-R0~B0-R1~B1-R2~B2-......
rank 2 ......F0-B0-F1-B1-F2-B2-............
""",
    ("gpipe", 3, 3, "overlap"): """
rank 0 F0-F1-F2-R0~......B0-R1~B1-R2~B2-
rank 1 ...F0-F1-F2-R0~B0-R1~B1-R2~B2-...
rank 2 ......F0-B0-F1-B1-F2-B2-.........
""",
    ("1f1b", 3, 4, "never"): """
rank 0 F0-F1-F2-......B0-F3-B1-...B2-...B3-
rank 1 ...F0-F1-...B0-F2-B1-F3-B2-...B3-...
rank 2 ......F0-B0-F1-B1-F2-B2-F3-B3-......
""",
    ("interleaved", 4, 4, "never", 2): """
rank 0 0F00F12F02F10F22B00F32B12F20B02F30B1...2B2...2B30B20B3
rank 1 ...1F01F13F03B03F13B11F21B01F31B13F23B23F33B31B21B3...
""",
    ("zb-h1", 3, 4, "never"): """
rank 0 F0-F1-F2-......I0<W0+F3-I1<W1+I2<W2+I3<W3+
rank 1 ...F0-F1-...I0<F2-I1<W0+F3-I2<W1+I3<W2+W3+
rank 2 ......F0-I0<F1-I1<F2-I2<W0+F3-I3<W1+W2+W3+
""",
    ("zbv", 4, 4, "never", 2): """
rank 0 0F00F10F23F03I03W0F-3I13W10F30I00W03F23I23W20I10W13F3I<3W3...0I20W20I30W3
rank 1 ...1F02F01F12F12I0W+1F21I01W02F22I12W11F31I11W12F32I2W+2I31I21I31W22W31W3
""",
    ("inference", 3, 3, "overlap"): """
rank 0 F0-F1-F2-......
rank 1 ...F0-F1-F2-...
rank 2 ......F0-F1-F2-
""",
}


@pytest.mark.parametrize("case", STAIRCASES, ids=lambda case: "-".join(map(str, case)))
def test_staircase(case: tuple) -> None:
    family, stages, microbatches, mode, *ranks = case
    more = {"num_ranks": ranks[0], "placement": "v" if family == "zbv" else "loop"} if ranks else {}
    assert drawn(family, stages, microbatches, mode, **more).replace("=", "-") == STAIRCASES[case]


def order(family: str, rank: int, **numbers: object) -> str:
    schedule = make_schedule(family, recompute="never", **numbers)  # type: ignore[arg-type]
    return " ".join(str(op) for op in schedule.lane(rank, Lane.COMPUTE))


def test_1f1b_with_all_forwards_in_flight_is_gpipe() -> None:
    for rank in range(4):
        numbers = {"num_stages": 4, "num_microbatches": 6}
        assert order("1f1b", rank, warmup=(6 - 1) * 3 + 1, **numbers) == order("gpipe", rank, **numbers)
        assert order("1f1b", rank, warmup=[6, 6, 6, 1], **numbers) == order("gpipe", rank, **numbers)


@pytest.mark.parametrize(
    ("warmup", "stash"),
    [
        (None, (4, 3, 2, 1)),
        (1, (4, 3, 2, 1)),
        (4, (4, 3, 2, 1)),
        (6, (6, 5, 3, 1)),
        (10, (6, 6, 4, 1)),
        ([6, 5, 2, 1], (6, 5, 2, 1)),
    ],
)
def test_warmup_is_the_forwards_in_flight(warmup: int | list[int] | None, stash: tuple[int, ...]) -> None:
    schedule = make_schedule("1f1b", num_stages=4, num_microbatches=6, warmup=warmup)
    assert peak_stash(schedule) == stash


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 8), (8, 16), (8, 40)])
def test_zero_bubble_leaves_the_fill_alone(ranks: int, microbatches: int) -> None:
    """Where f = i = w: (p - 1) f of a stage, in p sets: of ZB-H1's stages, and of ranks with two halves of them each."""
    shown = show("zb-h1", num_stages=ranks, num_microbatches=microbatches, recompute="never")
    assert shown.step_seconds == shown.bound_seconds == 3 * microbatches + ranks - 1
    assert [rank.peak_sets for rank in shown.breakdown] == [ranks] * ranks
    numbers = {"num_stages": 2 * ranks, "num_ranks": ranks, "placement": "v", "num_microbatches": microbatches}
    half = Costs.spread(2 * ranks, forward=0.5, backward=1, recompute=0.5)
    shown = show("zbv", **numbers, recompute="never", costs=half)
    assert shown.step_seconds == shown.bound_seconds == 3 * microbatches + (ranks - 1) / 2
    assert [rank.peak_sets for rank in shown.breakdown] == [2 * ranks] * ranks  # of half its layers each


@pytest.mark.parametrize(("sets", "step"), [(1, 70.5), pytest.param(2, 66.5, marks=pytest.mark.slow)])
def test_zero_bubble_v_in_a_few_places(sets: int, step: float) -> None:
    """In two of eight sets faster than 1F1B with all of them, which takes 69; the frontier of docs/SCHEDULES.md has more."""
    numbers = {"num_stages": 16, "num_ranks": 8, "placement": "v", "num_microbatches": 16}
    half = Costs.spread(16, forward=0.5, backward=1, recompute=0.5)
    shown = show("zbv", **numbers, recompute=RecomputePolicy(sets=sets), costs=half)
    assert shown.step_seconds == step
    assert max(rank.peak_sets for rank in shown.breakdown) <= 2 * sets


def depth_first(shape: Shape) -> list[list[Op]]:
    """A family of one's own: each microbatch all the way there and back before the next."""
    pairs = [(kind, i) for i in range(shape.num_microbatches) for kind in (Kind.F, Kind.B)]
    return [[Op(rank, kind, i) for kind, i in pairs] for rank in range(shape.num_ranks)]


def test_a_generator_of_ones_own_needs_nothing_else() -> None:
    shown = show(depth_first, num_stages=3, num_microbatches=2)
    assert shown.schedule.family == "depth_first"
    assert shown.step_seconds == 2 * 3 * (1 + 2)
    assert not [op for _, _, op in shown.schedule.ops() if op.kind is Kind.R]  # each B follows its F


def test_interleaving_leaves_out_what_is_beyond_the_microbatches() -> None:
    for rank in range(2):
        full = order("interleaved", rank, num_stages=4, num_ranks=2, num_microbatches=6)
        rest = [op for op in full.split() if not op.endswith("5")]
        assert order("interleaved", rank, num_stages=4, num_ranks=2, num_microbatches=5).split() == rest


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
def test_the_last_stage_alternates_and_keeps_its_one_set(family: str, mode: str) -> None:
    schedule = make_schedule(family, num_stages=3, num_microbatches=4, recompute=mode)
    assert " ".join(map(str, schedule.lane(2, Lane.COMPUTE))) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert {(2, microbatch) for microbatch in range(4)} <= schedule.kept
    peers = make_schedule(
        family, num_stages=3, num_microbatches=4, recompute=RecomputePolicy(mode, last_stage="always")
    )
    assert ((2, 0) in peers.kept) == (mode == "never")


def test_kept_sets_repeat_in_1f1b() -> None:
    policy = RecomputePolicy("overlap", sets=2)
    schedule = make_schedule("1f1b", num_stages=4, num_microbatches=12, recompute=policy)
    for stage in range(3):
        kept = sorted(microbatch for one, microbatch in schedule.kept if one == stage)
        in_flight = 4 - stage
        assert len(kept) >= 12 // in_flight - 1
        assert all(third - first >= in_flight for first, third in zip(kept, kept[2:]))  # two at once, one place each


def test_keeping_a_set_never_costs_time() -> None:
    for family in ("gpipe", "1f1b"):
        times = [
            show(family, num_stages=4, num_microbatches=8, recompute=RecomputePolicy(sets=sets)).step_seconds
            for sets in range(1, 9)
        ]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1] == 33


BAD = [
    ({"family": "1f1p"}, "did you mean '1f1b'"),
    ({"num_microbatches": 0}, "pipeline.num_microbatches=0"),
    ({"num_stages": 0}, "pipeline.num_stages=0"),
    ({"num_ranks": 5}, "5 ranks for pipeline.num_stages=4"),
    ({"first_backward": 5}, "first_backward=5"),
    ({"transport_ahead": -1}, "transport.prefetch=-1"),
    ({"warmup": 3}, "pipeline.warmup=3 is for pipeline.schedule=1f1b"),
    ({"family": "1f1b", "warmup": 23}, "pipeline.warmup=23: allowed are 1 to 22"),
    ({"family": "1f1b", "warmup": [4, 3]}, "has 2 numbers for 4 stages"),
    ({"family": "1f1b", "warmup": [4, 2, 2, 1]}, "stage 1 may have 3 to 8"),
    ({"family": "1f1b", "warmup": [4, 5, 2, 1]}, "stage 1 may have at most as many as stage 0"),
    ({"family": "1f1b", "num_ranks": 2}, "set pipeline.schedule=interleaved"),
    (
        {"family": "zb-h1", "num_ranks": 2},
        "pipeline.schedule='zb-h1' holds one stage per rank, not 4 stages on 2 ranks",
    ),
    (
        {"family": "zbv"},
        "two stages per rank in V-shaped placement; set pipeline.stages_per_rank=2 and pipeline.placement=v",
    ),
    ({"family": "zbv", "num_ranks": 2}, "pipeline.placement=loop with 4 stages on 2 ranks"),
    (
        {"family": "zbv", "num_ranks": 2, "placement": "v", "warmup": 3},
        "pipeline.warmup=3 is for pipeline.schedule=1f1b",
    ),
    ({"family": "interleaved", "num_ranks": 3}, "4 stages do not fit 3 ranks; use 3 or 6 stages"),
    ({"recompute": RecomputePolicy(sets=(2, 1))}, "recompute.sets=[2, 1] has 2 numbers for 4 stages"),
    (
        {"recompute": RecomputePolicy(stash=7)},
        "pipeline.schedule=gpipe recompute.stash=7: stage 0 holds 8 microbatches between F and B",
    ),
    ({"recompute": RecomputePolicy(stash=(8,) * 5)}, "recompute.stash=[8, 8, 8, 8, 8] has 5 numbers for 4 stages"),
    ({"recompute": "overlapp"}, "did you mean 'overlap'"),
    ({"recompute": {"segments": 0}}, "recompute.segments=0: allowed are 1 or more parts, sqrt or layers"),
    ({"recompute": {"segments": "half"}}, "recompute.segments='half': allowed are 1 or more parts, sqrt or layers"),
    ({"recompute": {"segments": "sqrt"}}, "recompute.segments=sqrt: how many parts that makes depends on the layers"),
    (
        {"recompute": {"segments": 4, "sets": 0.3}},
        "recompute.sets=0.3: stage 0 has 4 parts (recompute.segments=4), and a slot is for one of them, so allowed are",
    ),
    ({"recompute": {"segments": 4, "sets": 0.1}}, "allowed are multiples of 1/4; use 0.25"),
    ({"recompute": {"sets": 1.5}}, "recompute.sets=1.5: allowed is a whole number, 1 or more"),
    (
        {"family": "1f1b", "split_backward": True, "recompute": {"segments": 2}},
        "recompute.segments=2: with pipeline.split",
    ),
    ({"family": "zb-h1", "recompute": {"segments": 2}}, "recompute.segments=2: with pipeline.schedule"),
]


def asked_for(recompute: Any = "overlap", **arguments: Any) -> None:
    policy = RecomputePolicy(**recompute) if isinstance(recompute, dict) else recompute
    make_schedule(**{"num_stages": 4, "num_microbatches": 8, "recompute": policy, **arguments})


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        asked_for(**arguments)
    assert message in str(error.value)
