"""Layers that were measured alone: what stages made of them cost, what is worth keeping, and which profile is of something else."""

import dataclasses
import re
from pathlib import Path

import pytest
from random_plans import layer

from pipetrain.cli.profile_command import advice_of
from pipetrain.config.load import load_config
from pipetrain.plan.balance import cut_by_work
from pipetrain.plan.profile import (
    LOSS,
    PROFILE,
    OpProfile,
    Profile,
    SavedTensor,
    check_conditions,
    read_profile,
)
from pipetrain.plan.stage_costs import bytes_of_layers, costs_of_layers, stages_of
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Outputs, RecomputePolicy
from pipetrain.trainer.prepare import conditions_of, predict, prepare, profile_of

PRODUCT = OpProfile("mm", "matmul", "mlp", 2, 0.5, 40, 30, 10, 0.125, 10)
MIXED = OpProfile("_scaled", "attention", "mixer", 1, 0.25, 8, 0, 0, 0.0, 0)
CHEAP = OpProfile("silu", None, "mlp", 1, 0.0625, 20, 0, 0, 0.0, 0)
BLOCK = dataclasses.replace(
    layer(1, 1.0, inner=90, border=10, weights=64),
    numbers=(1, 2, 3),
    recompute_last_seconds=0.75,
    selective_seconds=0.03125,
    largest=(SavedTensor("mm", (2, 5), "float32", 40, 0.25),),
    ops=(PRODUCT, MIXED, CHEAP),
)
PLAIN = dataclasses.replace(BLOCK, ops=())
FIRST = dataclasses.replace(PLAIN, numbers=(0,), kind="Embedding", inner_bytes=0, input_bytes=4, selective_seconds=0.0)
END = dataclasses.replace(PLAIN, numbers=(4,), kind=LOSS, inner_bytes=7, output_bytes=1, recompute_last_seconds=0.5)
PROFILE_OF_FOUR = Profile(conditions={"model.hidden_size": 32}, layers=(FIRST, BLOCK, END))


def test_a_profile_of_layers_comes_back(tmp_path: Path) -> None:
    (tmp_path / PROFILE).write_text(PROFILE_OF_FOUR.as_json())
    assert read_profile(str(tmp_path)) == PROFILE_OF_FOUR
    assert PROFILE_OF_FOUR.num_layers == 4
    assert PROFILE_OF_FOUR.layer(2) is BLOCK


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"format_version": 2', '"format_version": 3', "format_version 3, known is 2"),
        ('"kind"', '"sort"', "sort"),
        ('"layers": [', '"layers": [], "others": [', "neither costs nor layers"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / PROFILE).write_text(PROFILE_OF_FOUR.as_json().replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"profile.json cannot be read \(.*{told}.*\); name another run"):
        read_profile(str(tmp_path))


def test_stages_are_the_sums_of_their_layers() -> None:
    costs = costs_of_layers(PROFILE_OF_FOUR, [2, 2])
    assert (costs.forward, costs.backward) == ((2.0, 3.0), (4.0, 6.0))  # the loss is of the last stage
    assert costs.recompute == (1 + 0.75, 1 + 1 + 0.5)
    assert costs.input_bytes == (4, 10)
    assert costs.set_bytes == (4 + 0 + 10 + 90, 10 + 90 + 10 + 90 + 10 + 7)  # a border is held once
    assert costs.kept_bytes == ()
    assert costs.hop_forward == (0.0,)


def test_parts_of_a_stage_have_about_equal_bytes() -> None:
    assert bytes_of_layers(PROFILE_OF_FOUR) == (0 + 10, 90 + 10, 90 + 10, 90 + 10 + 7)  # the last with the loss
    unlike = dataclasses.replace(PROFILE_OF_FOUR, layers=(FIRST, BLOCK, dataclasses.replace(END, inner_bytes=400)))
    policy = RecomputePolicy("inline", segments=2)  # type: ignore[arg-type]
    for profile, parts in ((PROFILE_OF_FOUR, (2, 2)), (unlike, (3, 1))):
        assert policy.of_layers([4], cut_by_work(bytes_of_layers(profile), [4])).parts == (parts,)


def test_what_is_kept_is_held_and_not_computed() -> None:
    looking = BLOCK.selective_seconds
    costs = costs_of_layers(PROFILE_OF_FOUR, [2, 2], [Outputs("matmul")])
    # In the last layer of a stage R does not come to the tail, which is not kept.
    assert costs.kept_bytes == (40 - 10, 40 + 40)
    assert costs.recompute == (1.75 + looking - (0.5 - 0.125), 2.5 + 3 * looking - 1.0)
    # Of 30 bytes that no backward of the layer needs, 10 are its output, which the next layer saves.
    assert costs.set_bytes == (104 + 30 - 10, 217 + 30 - 10 + 30 - 10)
    assert costs.forward == (2 + looking, 3 + 3 * looking)


@pytest.mark.parametrize(
    ("entry", "kept"),
    [
        ("attention", (8, 16)),
        ("mm", (30, 80)),
        ("aten::mm", (30, 80)),
        ("silu", (20, 40)),
        ("1", (38, 0)),
        ("1-2.mlp", (30, 40)),
        ("3.mlp:silu", (0, 20)),
        ("3.ml", (0, 0)),
    ],
)
def test_entries_mean_what_they_mean_in_a_run(entry: str, kept: tuple[int, int]) -> None:
    wanted = RecomputePolicy(selective=entry).selective
    assert costs_of_layers(PROFILE_OF_FOUR, [2, 2], wanted).kept_bytes == kept


def test_advice_begins_with_what_saves_most_per_byte() -> None:
    split = dataclasses.replace(PROFILE_OF_FOUR, layers=(FIRST, dataclasses.replace(BLOCK, numbers=(1, 3)), END))
    first, *_ = advice_of(PROFILE_OF_FOUR, 8)
    assert str(first) == (
        "keep attention outputs of layers 1-3: 0.0 MB more per microbatch in flight (0.0 MB for all 8), 6 s less R per step "
        "(recompute.selective=[1-3:attention])"
    )
    assert [one.bytes_per_microbatch for one in advice_of(PROFILE_OF_FOUR, 8)] == [24, 120]
    assert {one.selective for one in advice_of(split, 8)} == {"1:attention", "3:attention", "1:matmul", "3:matmul"}


def test_a_profile_of_another_model_names_what_differs() -> None:
    check_conditions("FILE", PROFILE_OF_FOUR, {"model.hidden_size": 32})
    told = (
        "plan.profile=FILE: measured with model.hidden_size=32, and this has 64; measure again with `pipetrain profile`"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        check_conditions("FILE", PROFILE_OF_FOUR, {"model.hidden_size": 64})


def test_a_run_has_parts_by_the_profile_of_its_layers(tmp_path: Path) -> None:
    """Six layers on two stages, of which the last block and the loss are heavy."""
    file = tmp_path / PROFILE
    words = (
        "data=stdlib pipeline.num_stages=2 pipeline.balance=[3,3] model.num_hidden_layers=4 recompute.segments=2 "
        "model.vocab_size=256"
    )
    keys = words.split()
    blocks = dataclasses.replace(BLOCK, numbers=(1, 2, 3))
    heavy = dataclasses.replace(BLOCK, numbers=(4,), inner_bytes=500, recompute_seconds=3.0)
    head, loss = dataclasses.replace(BLOCK, numbers=(5,)), dataclasses.replace(END, numbers=(6,), inner_bytes=400)
    measured = Profile(conditions=conditions_of(load_config(keys)), layers=(FIRST, blocks, heavy, head, loss))
    file.write_text(measured.as_json())
    assert prepare(load_config(keys)).schedule.policy.parts == ((2, 1), (1, 2))  # by work
    given = [*keys, f"plan.profile={file}"]
    policy = prepare(load_config(given)).schedule.policy
    assert policy.parts == ((2, 1), (2, 1))
    assert policy.share_of(1, 0) == (1 + 3) / (1 + 3 + 1 + 1)
    assert predict(load_config(given)).schedule.policy == policy
    kept = profile_of(load_config([*given, "recompute.keep_layers=2"]))
    assert [kept.layer(number).is_kept for number in range(4)] == [False, False, True, False]
    with pytest.raises(ValueError, match=r"measured with precision=auto, and this has bf16-mixed"):
        prepare(load_config([*given, "precision=bf16-mixed"]))
    with pytest.raises(ValueError, match=r"measured with data.global_batch_size / .*=2, and this has 1; measure again"):
        prepare(load_config([*given, "parallel.num_replicas=2"]))
    file.write_text(Profile(Costs.spread(2), 8).as_json())
    with pytest.raises(ValueError, match=r"by which recompute.segments=2 cuts a stage; measure the layers with"):
        prepare(load_config(given))
    assert predict(load_config(given)).schedule.policy.parts == ()


@pytest.mark.parametrize(
    ("entries", "recompute", "kept"),
    [
        # With the copy of its output. Its input is that of the stage, which is held for R anyway.
        (["2"], (1.75, 1 + 0.5), (0, 90 + 10)),
        (["1"], (0.75, 2.5), (10 + 90 + 10, 0)),  # R computes its input again
        (["Block"], (0.75, 0.5), (10 + 90 + 10, 90 + 10 + 90 + 10)),
        (["0-3", "loss"], (0, 0), (10 + 90 + 10, 90 + 10 + 90 + 10 + 7 + 1)),
    ],
)
def test_layers_that_no_r_runs_stay(entries: list[str], recompute: tuple[float, ...], kept: tuple[int, ...]) -> None:
    profile = PROFILE_OF_FOUR.keeping(entries)
    costs = costs_of_layers(profile, [2, 2])
    assert (costs.recompute, costs.kept_bytes) == (recompute, kept)
    assert [one.own for one in stages_of(profile, [2, 2])] == [one.own for one in stages_of(PROFILE_OF_FOUR, [2, 2])]
    assert profile.num_layers == 4
    assert PROFILE_OF_FOUR.keeping([]) is PROFILE_OF_FOUR
