"""Which layers make a stage and which rank holds it, and a plan that is given beside other arguments."""

from __future__ import annotations

from typing import Any

import pytest

from pipetrain.plan.plan import Plan, given_plan, make_plan

PLACED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "loop": ({"num_ranks": 2, "stages_per_rank": 2}, (0, 1, 0, 1)),
    "v": ({"num_ranks": 2, "stages_per_rank": 2, "placement": "v"}, (0, 1, 1, 0)),
    "a list says how many stages and ranks there are": ({"placement": [0, 1, 1, 0]}, (0, 1, 1, 0)),
    "of different lengths": ({"placement": [2, 0, 1, 1], "num_ranks": 3}, (2, 0, 1, 1)),
    "ranks that the stages need": ({"num_stages": 4, "stages_per_rank": 2}, (0, 1, 0, 1)),
    "one rank": ({}, (0,)),
}


@pytest.mark.parametrize("name", PLACED)
def test_stages_are_placed(name: str) -> None:
    arguments, expected = PLACED[name]
    plan = make_plan(6, **arguments)
    assert plan.stage_ranks == expected
    assert plan.num_ranks == max(expected) + 1
    assert sum(plan.balance) == 6
    assert [stage for rank in range(plan.num_ranks) for stage in plan.stages_of(rank)] == sorted(
        range(len(expected)), key=lambda stage: (expected[stage], stage)
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"placement": [0, 1, 1, 0], "stages_per_rank": 3}, "pipeline.stages_per_rank=3 does not fit pipeline.placement=[0, 1, 1, 0]"),
    ({"placement": []}, "pipeline.placement=[] names no rank; give the rank of each stage"),
    ({"num_ranks": 3, "num_stages": 4}, "pipeline.num_stages=4 does not fit 3 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_what_does_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_plan(6, **arguments)
    assert message in str(error.value)


GIVEN = Plan(balance=(1, 2, 2, 1), stage_ranks=(0, 1, 1, 0), num_microbatches=4)


def used(plan: Plan, **said: Any) -> Plan:
    usual: dict[str, Any] = {"num_ranks": 2, "num_stages": None, "stages_per_rank": 1, "num_microbatches": 8}
    return given_plan(plan, said.pop("num_layers", 6), **{**usual, "balance": "auto", **said})


def test_a_given_plan_is_used_as_it_is() -> None:
    assert used(GIVEN) is GIVEN
    assert used(GIVEN, num_stages=4, stages_per_rank=2, num_microbatches=4, balance=[1, 2, 2, 1]) is GIVEN


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_stages": 2}, "num_stages=2: the plan says 4"),
    ({"stages_per_rank": 3}, "stages_per_rank=3: the plan says 2"),
    ({"num_microbatches": 2}, "num_microbatches=2: the plan says 4"),
    ({"balance": [2, 2, 1, 1]}, "balance=[2, 2, 1, 1]: the plan says [1, 2, 2, 1]; leave balance out"),
    ({"num_layers": 7}, "its balance [1, 2, 2, 1] is for 6 layers, the model has 7: make it with make_plan(7, ...)"),
    ({"num_ranks": 3}, "it is for 2 ranks, and there are 3: start 2 ranks"),
]


@pytest.mark.parametrize(("said", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_a_given_plan_and_what_is_said_beside_it(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        used(GIVEN, **said)
    assert message in str(error.value)


def test_a_plan_made_by_hand_is_looked_at() -> None:
    with pytest.raises(ValueError, match="rank 1 holds no stage"):
        used(Plan((3, 3), (0, 2), 4), num_ranks=3)
