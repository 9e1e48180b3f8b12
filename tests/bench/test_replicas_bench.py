"""The benchmark of replicas: what it has each bucket take, what it compares."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.replicas.run import WORKLOAD, Steps, Turn, _targets, in_parts, rests_of, simulated_exposed, whole
from benchmarks.replicas.sums import Sums, seconds_of
from benchmarks.stolen import Stolen
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

SUMS = Sums(4, (0.2, 0.4))


@pytest.mark.parametrize(
    ("system", "op", "seconds"),
    [
        (whole("1f1b"), "0REDUCE_GRAD.0", 0.2),
        (whole("1f1b"), "1REDUCE_GRAD.0", 0.4),
        (in_parts("1f1b"), "1REDUCE_GRAD.3", 0.05),
        (whole("interleaved"), "3REDUCE_GRAD.0", 0.2),
        (in_parts("interleaved"), "2REDUCE_GRAD.1", 0.025),
    ],
    ids=str,
)
def test_what_a_bucket_takes(system, op: str, seconds: float) -> None:  # type: ignore[no-untyped-def]
    assert seconds_of(Op.parse(op), system.schedule(WORKLOAD), SUMS) == pytest.approx(seconds)


def test_what_no_order_hides() -> None:
    """One bucket of the rank that is done last is exposed whole, of eight one eighth; of two stages on a rank half, less what is beside it."""
    reduce = WORKLOAD.backward_seconds
    for family, mode in itertools.product(("gpipe", "1f1b"), (Mode.OVERLAP, Mode.NEVER)):
        assert simulated_exposed(whole(family, mode), WORKLOAD) / reduce == pytest.approx(1)
        assert simulated_exposed(in_parts(family, mode), WORKLOAD) / reduce == pytest.approx(1 / 8)
    for mode in (Mode.OVERLAP, Mode.NEVER):
        assert simulated_exposed(whole("interleaved", mode), WORKLOAD) / reduce == pytest.approx(1 / 2)
        assert simulated_exposed(in_parts("interleaved", mode), WORKLOAD) / reduce == pytest.approx(1 / 8)


def test_from_a_rank_s_last_backward_to_the_end_of_the_step() -> None:
    timeline = simulate(make_schedule("1f1b", num_stages=2, num_microbatches=4, recompute="never"), Costs.spread(2))
    assert rests_of(timeline) == (0, 2)


def test_what_is_promised_of_rounds() -> None:
    """A tenth of the reduce beyond the least is too much, a fiftieth is not."""
    reduce = WORKLOAD.backward_seconds
    stages = [[Turn((2.0, 2 + 1.02 * reduce))], [Turn((2.0, 2 + 0.1 * reduce))]]
    disturbed = Turn((2.0, 9.0, 1.0), (0.0, 0.3, 0.0))
    rows = [
        Steps(whole("1f1b"), [Turn((2.0, 2.0 + reduce, 3.2)), disturbed], stages, [(0.0, reduce)]),
        Steps(in_parts("1f1b"), [Turn((2.2, 2.2 + 0.3 * reduce, 2.2))], [[], []]),
        Steps(whole("1f1b", Mode.NEVER), [Turn((2.0, 2.0 + 1.1 * reduce, 2.0))], [[], []]),
        Steps(in_parts("1f1b", Mode.NEVER), [Turn((1.5, 1.5 + 0.1 * reduce, 2.2))], [[], []]),
    ]
    held = {target.what.split("pipetrain 1f1b ")[1]: target.met for target in _targets(rows, WORKLOAD)}
    assert held == {
        "overlap, a bucket per stage: exposed of stage 0 over the least, as a part of the reduce": True,
        "overlap, a bucket per stage: exposed of stage 1 over the least, as a part of the reduce": False,
        "overlap, a bucket per stage / torch 1f1b, then an all-reduce": True,
        "overlap, a bucket per part: exposed, as a part of a blocking reduce": False,
        "overlap, a bucket per part / torch 1f1b, then an all-reduce": False,
        "never, a bucket per stage: exposed over what is simulated, as a part of the reduce": False,
        "never, a bucket per part: exposed, as a part of a blocking reduce": True,
        "never, a bucket per part / torch 1f1b without recomputation, then an all-reduce": True,
    }


def test_what_the_host_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr("benchmarks.stolen._STAT", stat)
    assert Stolen().share() == 0
    stat.write_text("cpu  100 0 50 800 0 0 0 50 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    stolen = Stolen()
    stat.write_text("cpu  130 0 60 830 0 0 0 80 7 7\n")
    assert stolen.share() == pytest.approx(0.3)
    assert stolen.share() == 0
