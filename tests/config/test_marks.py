"""The marks beside the fields of the records: the values that a key may have, and those that a resumed run must keep."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Annotated

import pytest

from pipetrain.config.limits import Limit, MayChange, at_least, choice_of, each, matching, more_than, only, within
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import check_limits, guarded_keys, keys, limits
from pipetrain.schedule.placement import MOST_STAGES

# the limit -> values that it takes, values that it refuses, what is told of the first of these
LIMITS: dict[str, tuple[Limit, list[object], list[object], str]] = {
    "at least": (at_least(1), [1, 2, None], [0, -1], "k=0: allowed is 1 or more"),
    "more than": (more_than(0), [0.1], [0.0, float("nan")], "k=0.0: allowed is more than 0"),
    "finite": (at_least(0), [1e300], [float("inf")], "k=inf: allowed is a finite number, 0 or more"),
    "at most": (at_least(1, most=9), [9], [10], "k=10: allowed is 9 at most"),
    "not a number": (at_least(0), [0.0], [float("nan")], "k=nan: allowed is a finite number, 0 or more"),
    "each": (
        each(0, 9, "a time"),
        [1, (0, 9.0)],
        [(1, -1)],
        "k=[1, -1]: allowed is a time from 0 to 9, or a list of such numbers",
    ),
    "each finite": (
        each(0, 9, "a time"),
        [()],
        [(1, float("nan"))],
        "k=[1, nan]: allowed is a finite number, a time from 0 to 9, or a list of such numbers",
    ),
    "within": (within(0, 1), [0, 1], [1.1, -0.1], "k=1.1: allowed is from 0 to 1"),
    "choice": (choice_of("stop", "skip"), ["skip"], ["skp"], "k=skp: allowed are stop, skip; did you mean 'skip'?"),
    "matching": (matching(r"\d+", "digits"), ["12", 12], ["1 2"], "k=1 2: allowed is digits"),
    "only": (only(False, "wait"), [False], [True], "k=true: not supported, only false is; wait"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit(name: str) -> None:
    limit, taken, refused, told = LIMITS[name]
    assert [value for value in taken if limit.problem("k", value) is not None] == []
    assert [value for value in refused if limit.problem("k", value) is None] == []
    assert limit.problem("k", refused[0]) == told


@dataclass(frozen=True)
class Inner:
    width: Annotated[int, at_least(2)] = 2
    depth: MayChange[Annotated[int, at_least(3)] | None] = None


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    inner: Inner = field(default_factory=Inner)
    other: MayChange[Inner] = field(default_factory=Inner)


def test_marks_are_read_through_unions_and_groups() -> None:
    assert set(limits(Outer)) == {"inner.width", "inner.depth", "other.width", "other.depth"}
    check_limits(Outer())
    with pytest.raises(ConfigError, match=r"^group\.inner\.depth=2: allowed is 3 or more$"):
        check_limits(Outer(inner=Inner(depth=2)), "group.")


def test_a_key_is_guarded_unless_it_or_its_group_may_change() -> None:
    assert guarded_keys(Outer) == ["name", "inner.width"]


def test_what_a_run_that_goes_on_must_keep() -> None:
    """What it computes: everything else may change, and a key that is new is guarded until it is marked."""
    data = (
        "name subset split text_field tokenizer layout assistant_only_loss template_date item_type "
        "global_batch_size sequence_length truncate "
        "eval_split eval_fraction target args collate file_sha256"
    )
    model = (
        "name num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size "
        "vocab_size max_position_embeddings rope_theta dropout norm_epsilon dtype attention lora.rank lora.targets lora.layers lora.alpha "
        "target args loss loss_args count count_args file_sha256"
    )
    of_groups = {f"data.{name}" for name in data.split()} | {f"model.{name}" for name in model.split()}
    assert set(guarded_keys()) == {"seed", "precision", *of_groups}


@dataclass(frozen=True)
class Grown(RunConfig):
    new_key: int = 0
    free_key: MayChange[int] = 0


def test_a_new_key_is_guarded() -> None:
    assert set(guarded_keys(Grown)) - set(guarded_keys()) == {"new_key"}


def test_marks_do_not_change_types_or_defaults() -> None:
    assert keys()["steps"] == (int | None)
    assert keys()["snapshot.every_steps"] == (int | None)
    check_limits(RunConfig())
    with pytest.raises(ConfigError, match="steps=0: allowed is 1 or more"):
        check_limits(replace(RunConfig(), steps=0))


# Numbers among words, which the schedule and the plan know: they check both together.
WITHOUT_A_RANGE = (
    "pipeline.placement pipeline.balance pipeline.warmup recompute.sets recompute.keep recompute.stash "
    "recompute.segments recompute.keep_layers recompute.host_bytes recompute.verify"
)


def test_every_number_has_a_range() -> None:
    numbers = {key for key, kind in keys().items() if {"int", "float"} & set(re.findall(r"\w+", str(kind)))}
    assert len(numbers) > 50
    assert sorted(numbers - limits().keys()) == sorted(WITHOUT_A_RANGE.split())


def test_no_number_may_be_infinite() -> None:
    """Whatever a range says: nan passes `not value < least`, and inf every bound from below."""
    for key, limit in limits().items():
        for value in (math.nan, math.inf, -math.inf):
            refusal = limit.problem(key, value)
            assert refusal is not None, key
            assert refusal.startswith(f"{key}={value}"), key


def test_as_many_stages_as_a_schedule_may_have() -> None:
    assert limits()["pipeline.num_stages"].most == MOST_STAGES
