"""What a user may ask of recomputation, and what is refused."""

from typing import Any

import pytest

from pipetrain.schedule.policy import Keep, Outputs, RecomputePolicy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sets": 0}, ["recompute.sets=0", "1 or more"]),
        ({"sets": [2, 0]}, ["recompute.sets=[2, 0]", "1 or more"]),
        ({"sets": []}, ["recompute.sets=[]", "one per stage"]),
        ({"sets": True}, ["recompute.sets=True", "whole number"]),
        ({"sets": "2"}, ["recompute.sets='2'", "whole number"]),
        ({"stash": 0}, ["recompute.stash=0", "1 or more"]),
        ({"keep": 2}, ["recompute.keep=2", "none and auto", "recompute.sets=3"]),
        ({"keep": "atuo"}, ["recompute.keep='atuo'", "did you mean 'auto'"]),
    ],
)
def test_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        RecomputePolicy(**fields)
    assert all(word in str(error.value) for word in words)


def test_sets_are_kept_where_there_is_more_than_one_place() -> None:
    keeping: list[dict[str, Any]] = [{"sets": 2}, {"sets": (1, 2)}, {"keep": "auto"}]
    others: list[dict[str, Any]] = [{}, {"sets": (1, 1)}, {"sets": 2, "keep": "none"}]
    assert [RecomputePolicy(**fields).keeps for fields in (*keeping, *others)] == [True] * 3 + [False] * 3


def test_a_list_is_held_as_a_tuple() -> None:
    policy = RecomputePolicy(sets=[2, 1], stash=[4, 3], keep="auto")  # type: ignore[arg-type]
    assert (policy.sets, policy.stash, policy.keep) == ((2, 1), (4, 3), Keep.AUTO)
    assert [policy.places_of(stage) for stage in (0, 1)] == [2, 1]
    assert [policy.stash_of(stage) for stage in (0, 1)] == [4, 3]
    assert RecomputePolicy("never", sets=2).places_of(0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("matmul", Outputs("matmul")),
        ("library::op", Outputs("library::op")),
        ("3", Outputs(None, 3, 3)),
        ("0-5", Outputs(None, 0, 5)),
        ("3.mlp.down", Outputs(None, 3, 3, "mlp.down")),
        ("0-5:attention", Outputs("attention", 0, 5)),
        ("0-5.mlp:aten::mm", Outputs("aten::mm", 0, 5, "mlp")),
    ],
)
def test_entries_of_selective(text: str, expected: Outputs) -> None:
    assert Outputs.parse(text) == expected
    assert str(expected) == text
    assert RecomputePolicy(selective=text).selective == RecomputePolicy(selective=[text]).selective == (expected,)


@pytest.mark.parametrize("text", ["", "mat mul", "5-3", "-1", "3:", ":mm", "3.:mm", "mlp:mm"])
def test_what_is_no_entry_of_selective(text: str) -> None:
    with pytest.raises(ValueError, match=r"recompute.selective=.*: allowed are matmul, attention"):
        RecomputePolicy(selective=text)


def test_layers_of_selective_that_the_model_has_not() -> None:
    RecomputePolicy(selective=("matmul", "0-5")).check_layers(6)
    with pytest.raises(ValueError, match=r"recompute.selective=4-6.mlp: the model has the layers 0 to 5"):
        RecomputePolicy(selective=("matmul", "4-6.mlp")).check_layers(6)
