"""Layers per stage by their work, and by the simulated step, R counted: never slower than equal ones, and the best there is where all are tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pipetrain.config.load import load_config
from pipetrain.config.records import ModelConfig
from pipetrain.models.size import size_of
from pipetrain.plan.balance import balance_by_step, balance_by_work, balance_evenly, balance_told, costs_by_work
from pipetrain.plan.plan import make_plan
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.make import make
from pipetrain.schedule.policy import LastStage, RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.simulate import simulate
from pipetrain.trainer.prepare import prepare, prepare_phases


def all_balances(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(end - start for start, end in itertools.pairwise(ends))


def heaviest(work: Sequence[float], balance: Sequence[int]) -> float:
    rest = iter(work)
    return max(sum(itertools.islice(rest, count)) for count in balance)


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.0, 2.3, 7.0]), min_size=1, max_size=9), st.integers(1, 9))
@example([2.0, 1.0, 3.0, 1.0], 3)  # one layer less in the first stage is nearer to the mean, and too much for the rest
def test_the_heaviest_stage_is_as_light_as_can_be(work: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(work))
    found = balance_by_work(work, num_stages)
    assert sum(found) == len(work)
    assert len(found) == num_stages
    assert min(found) >= 1
    least = min(heaviest(work, balance) for balance in all_balances(len(work), num_stages))
    assert heaviest(work, found) == pytest.approx(least, abs=1e-12)


@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([1.0, 0.1, 1e12, 0.0]))
def test_equal_layers_are_shared_out_evenly(num_layers: int, num_stages: int, work: float) -> None:
    num_stages = min(num_stages, num_layers)
    assert balance_by_work([work] * num_layers, num_stages) == balance_evenly(num_layers, num_stages)


def test_a_head_that_is_more_than_two_blocks() -> None:
    """28 blocks and a vocabulary of 152k: with equal numbers the last stage has a sixth more to do than it need have."""
    work = [0.0, *[1.0] * 28, 2.3]
    assert balance_evenly(30, 4) == (7, 7, 8, 8)
    assert heaviest(work, (7, 7, 8, 8)) == pytest.approx(9.3)
    assert balance_by_work(work, 4) == (9, 7, 8, 6)
    assert heaviest(work, (9, 7, 8, 6)) == 8.0
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        balance_by_work([1.0, 1.0], 3)


def test_a_plan_takes_the_work_where_nothing_else_is_said() -> None:
    work = [0.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    assert make_plan(6, num_ranks=2).balance == (3, 3)
    assert make_plan(6, num_ranks=2, work=work).balance == (4, 2)
    assert make_plan(6, num_ranks=2, work=work, balance=[1, 5]).balance == (1, 5)


def test_thousands_of_layers() -> None:
    found = balance_by_work([0.0, *[1.0] * 10_000, 50.0], 4096)
    assert (len(found), sum(found), found[-1]) == (4096, 10_002, 1)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_small_gpt_is_cut_into_equal_numbers(num_stages: int) -> None:
    size = size_of(ModelConfig(), vocabulary_size=256, sequence_length=256)
    assert size.flops_per_layer is not None
    assert balance_by_work(size.flops_per_layer, num_stages) == balance_evenly(6, num_stages)


# By the simulated step -----------------------------------------------------------------------------------------------


class Problem:
    """A schedule over stages whose layers have some work; an average stage takes F 1, B 2 and R 1 times `scale`."""

    def __init__(self, work: list[float], spec: ScheduleSpec, scale: float = 1.0) -> None:
        self.spec, self.work = spec, work
        self.mean = Costs.spread(spec.num_stages, forward=scale, backward=2 * scale, recompute=scale)
        self.start = balance_by_work(work, spec.num_stages)

    def costs_of(self, balance: tuple[int, ...]) -> Costs:
        return costs_by_work(balance, self.work, self.mean)

    def seconds(self, balance: tuple[int, ...]) -> float:
        costs = self.costs_of(balance)
        policy = self.spec.policy.of_layers(balance)
        spec = replace(self.spec, policy=policy, costs=costs if self.spec.family == AUTO else None)
        return simulate(make(spec), costs).step_seconds

    def found(self) -> tuple[int, ...]:
        return balance_by_step(self.start, self.spec, self.costs_of)


def problem(num_stages: int, num_microbatches: int, family: str, num_layers: int | None = None, **more: Any) -> Problem:
    spec = ScheduleSpec(family, tuple(range(num_stages)), num_microbatches, **more)
    return Problem([1.0] * (num_layers or 6 * num_stages), spec)


# num_stages, num_microbatches, family, equal layers, R counted, layers
TABLE = [
    (2, 8, "gpipe", 32.0, 30.5, (5, 7)),
    (2, 8, "1f1b", 33.0, 30.5, (5, 7)),
    (4, 8, "gpipe", 38.0, 36.5, (6, 6, 5, 7)),
    (4, 16, "gpipe", 70.0, 68.5, (6, 6, 5, 7)),
    (8, 16, "gpipe", 82.0, 80.5, (6, 6, 6, 6, 6, 6, 5, 7)),
    (4, 8, "1f1b", 39.0, 38.0, (6, 6, 5, 7)),
    (4, 16, "1f1b", 71.0, 70.0, (6, 6, 5, 7)),
    (2, 8, "auto", 30.0, 30.0, (6, 6)),
    (4, 8, "auto", 37.0, 36.5, None),  # several are as good
    (4, 16, "auto", 69.0, 68.0, (6, 6, 5, 7)),
]


@pytest.mark.parametrize(("num_stages", "num_microbatches", "family", "equal", "counted", "layers"), TABLE)
def test_what_counting_r_brings(
    num_stages: int, num_microbatches: int, family: str, equal: float, counted: float, layers: tuple[int, ...] | None
) -> None:
    given = problem(num_stages, num_microbatches, family)
    assert given.seconds((6,) * num_stages) == pytest.approx(equal)
    found = given.found()
    assert given.seconds(found) == pytest.approx(counted)
    assert layers is None or found == layers


def test_interleaved_stages_take_pairs_of_moves() -> None:
    """12 layers on 2 ranks with 2 stages each: no single move is better."""
    given = Problem([1.0] * 12, ScheduleSpec("interleaved", (0, 1, 0, 1), 8), scale=0.5)
    assert given.seconds((3, 3, 3, 3)) == pytest.approx(32.0)
    assert given.seconds((2, 2, 3, 5)) == pytest.approx(31 + 2 / 3)
    assert given.seconds(given.found()) <= 31 + 2 / 3 + 1e-9


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "auto"])
@pytest.mark.parametrize("num_microbatches", [3, 8, 16])
@pytest.mark.parametrize("num_layers", [5, 12, 14])
def test_of_two_stages_the_best_of_all_is_found(family: str, num_microbatches: int, num_layers: int) -> None:
    given = problem(2, num_microbatches, family, num_layers)
    best = min(given.seconds((first, num_layers - first)) for first in range(1, num_layers))
    assert given.seconds(given.found()) * 0.995 <= best * (1 + 1e-9)


@pytest.mark.parametrize("last_stage", [LastStage.ALWAYS, None])
def test_equal_stages_that_do_the_same_stay_equal(last_stage: LastStage | None) -> None:
    policy = RecomputePolicy("never") if last_stage is None else RecomputePolicy("inline", last_stage=last_stage)  # type: ignore[arg-type]
    for family, num_stages in itertools.product(("gpipe", "1f1b"), (2, 4)):
        assert problem(num_stages, 8, family, policy=policy).found() == (6,) * num_stages


def test_few_layers_and_large_pipelines_stay_as_they_are() -> None:
    assert problem(2, 8, "gpipe", 6).found() == (3, 3)
    assert problem(1, 8, "gpipe", 6).found() == (6,)
    assert Problem([1.0] * 12, ScheduleSpec("gpipe", (0, 0), 8)).found() == (6, 6)  # a rank alone waits for nobody
    assert problem(256, 64, "gpipe", 512).found() == (2,) * 256  # 16,384 stages x microbatches


WORK = st.lists(st.sampled_from([0.0, 0.2, 1.0, 1.0, 1.0, 3.0]), min_size=4, max_size=14)
POLICIES = st.sampled_from(
    [RecomputePolicy(mode) for mode in ("never", "inline", "early", "overlap")]  # type: ignore[arg-type]
    + [RecomputePolicy(sets=2), RecomputePolicy(segments=2), RecomputePolicy(last_stage=LastStage.ALWAYS)]
)


@examples(40, 500, WORK, st.integers(2, 4), st.integers(1, 9), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), POLICIES)
def test_it_is_never_slower_than_equal_work(
    work: list[float], num_stages: int, num_microbatches: int, family: str, policy: RecomputePolicy
) -> None:
    assume(not (family == "zb-h1" and policy.in_parts))  # refused: halves of a backward have no parts
    given = Problem(work, ScheduleSpec(family, tuple(range(num_stages)), num_microbatches, policy=policy))
    found = given.found()
    assert (len(found), sum(found), min(found) >= 1) == (num_stages, len(work), True)
    assert found == given.found()
    if found != given.start:
        assert given.seconds(found) < given.seconds(given.start)


def test_it_is_told_in_one_line() -> None:
    policy = RecomputePolicy()
    line = "balance 5, 7 layers: the last stage does not recompute (shorter simulated step than 6, 6)"
    assert balance_told((5, 7), (6, 6), policy) == line
    assert balance_told((6, 6), (6, 6), policy) == ""
    assert "does not recompute" not in balance_told((5, 7), (6, 6), replace(policy, last_stage=LastStage.ALWAYS))


# A run ----------------------------------------------------------------------------------------------------------------

TWELVE = ["model.num_hidden_layers=10", "pipeline.num_stages=2", "pipeline.num_microbatches=8"]


def test_a_run_counts_r_and_keeps_what_is_said() -> None:
    made = prepare(load_config(TWELVE))
    assert (made.plan.balance, made.note.startswith("balance 5, 7 layers")) == ((5, 7), True)
    kept = prepare(load_config([*TWELVE, "pipeline.balance=[6,6]"]))
    assert (kept.plan.balance, kept.note) == ((6, 6), "")
    assert prepare(load_config([*TWELVE, "cost.forward_seconds=[1,1]"])).plan.balance == (6, 6)
    assert prepare(load_config([*TWELVE, "recompute=never"])).plan.balance == (6, 6)
    phases = prepare_phases(load_config([*TWELVE, "phases=[{from:0},{from:9,recompute:{mode:never}}]"]))
    assert [phase.run.plan.balance for phase in phases] == [(5, 7), (5, 7)]
