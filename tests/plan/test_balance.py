"""Layers per stage by their work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipetrain.config.records import ModelConfig
from pipetrain.models.size import size_of
from pipetrain.plan.balance import balance_by_work, balance_evenly
from pipetrain.plan.plan import make_plan


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
