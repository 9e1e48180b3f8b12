"""`pipetrain plan`: what it prints, that its keys make the run that it priced, and what it says of bad input."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from random_plans import layer, random_profile

from pipetrain.cli.main import main
from pipetrain.config.load import load_config
from pipetrain.plan.profile import PROFILE, Profile
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.simulate import simulate
from pipetrain.trainer.prepare import conditions_of, prepare, profile_of

KEYS = "model.num_hidden_layers=4 data.global_batch_size=8 pipeline.num_microbatches=4 pipeline.search_seconds=0"
MODEL = KEYS.split()
SECONDS = ("forward_seconds", "backward_seconds", "recompute_seconds")
NAMES = (
    "num_stages balance schedule num_microbatches sets segments selective step_seconds peak_bytes "
    "peak_activation_bytes keys tokens_per_second bubble_fraction"
)


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of the model of `MODEL`, in the current folder, for microbatches of two samples and of one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drawn = random_profile(random.Random(0), 6)
    light = {"parameter_bytes": 8, "gradient_bytes": 8, "optimizer_bytes": 16}  # activations alone decide
    two = dataclasses.replace(drawn, layers=tuple(dataclasses.replace(own, **light) for own in drawn.layers))
    one = tuple(
        dataclasses.replace(own, inner_bytes=own.inner_bytes // 2, **{key: getattr(own, key) * 0.75 for key in SECONDS})
        for own in two.layers
    )
    found = dataclasses.replace(two, conditions=conditions_of(load_config(MODEL)), samples=2, smaller=one)
    (tmp_path / PROFILE).write_text(found.as_json())
    return tmp_path / PROFILE


def planned(capsys: pytest.CaptureFixture[str], *typed: str) -> dict[str, Any]:
    assert main(["plan", *MODEL, *typed, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_plans_have_the_names_that_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys)
    assert found["fits"] is True
    assert 1 <= len(found["plans"]) <= 5
    assert found["plans"][0].keys() >= set(NAMES.split())
    seconds = [one["step_seconds"] for one in found["plans"]]
    assert seconds == sorted(seconds)
    for one in found["plans"]:
        assert len(one["peak_activation_bytes"]) == len(one["memory"]) == 2
        assert one["tokens_per_second"] == pytest.approx(8 * 256 / one["step_seconds"])


@pytest.mark.parametrize(
    "typed",
    [[], ["recompute.mode=overlap", "pipeline.schedule=auto"], ["pipeline=1f1b"], ["recompute.segments=2"]],
    ids=str,
)
def test_the_printed_keys_make_the_run_that_was_priced(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for one in planned(capsys, *typed)["plans"]:
        config = load_config([*MODEL, *typed, *one["keys"]])
        run = prepare(config)
        assert list(run.plan.balance) == one["balance"]
        assert (run.schedule.family, run.plan.num_microbatches) == (one["schedule"], one["num_microbatches"])
        named = dataclasses.replace(config, plan=dataclasses.replace(config.plan, profile=PROFILE))
        costs = costs_of_layers(profile_of(named), run.plan.balance)
        assert simulate(run.schedule, costs).step_seconds <= one["step_seconds"] * (1 + 1e-9)


def test_the_text_says_why_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    free = [word for word in MODEL if "num_microbatches" not in word]
    assert main(["plan", *free]) == 0
    text = capsys.readouterr().out
    for part in ("Plan 1 is", "plan 1: ", "plan 1 holds", "weights", "Other microbatches change dropout's masks"):
        assert part in text
    assert main(["plan", *MODEL]) == 0
    assert "Other microbatches" not in capsys.readouterr().out


def test_a_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    free = planned(capsys)["plans"][0]
    tight = planned(capsys, f"plan.memory_budget_bytes={int(free['peak_bytes'] * 0.6)}")
    assert tight["fits"]
    assert all(one["peak_bytes"] <= free["peak_bytes"] * 0.6 for one in tight["plans"])
    assert tight["plans"][0]["step_seconds"] >= free["step_seconds"]


def test_where_nothing_fits_three_things_would(capsys: pytest.CaptureFixture[str]) -> None:
    held, little = ["recompute.mode=never", "pipeline.num_stages=2"], 1000
    least = little + planned(capsys, *held, f"plan.memory_budget_bytes={little}")["missing_bytes"]
    without = little + planned(capsys, held[1], f"plan.memory_budget_bytes={little}")["missing_bytes"]
    assert without < least
    found = planned(capsys, *held, f"plan.memory_budget_bytes={without}")
    assert not found["fits"]
    assert found["missing_bytes"] == least - without
    assert len(found["would_fit"]) == 3
    assert any("without recompute.mode=never" in one for one in found["would_fit"])
    assert found["would_fit"][-1].startswith(f"plan.memory_budget_bytes={least}")
    assert planned(capsys, *held, f"plan.memory_budget_bytes={least}")["fits"]
    assert main(["plan", *MODEL, *held, f"plan.memory_budget_bytes={without}"]) == 0
    assert "the smallest plan needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            ["plan.memory_budget_bytes=10"],
            "plan.memory_budget_bytes=10: weights, gradients and optimizer state alone take",
        ),
        (["plan.memory_budget_bytes=0"], "plan.memory_budget_bytes=0: allowed is 1 or more"),
        (["model.hidden_size=256"], "measured with model.hidden_size=64, and this has 256; measure again"),
        (["data.sequence_length=64"], "measured with data.sequence_length=256, and this has 64"),
        (["plan.profile=nowhere.json"], "nowhere.json/profile.json is not there"),
        (["engine=deepspeed"], "plans are for engine=native"),
        (["phases=[{from: 0}]"], "leave phases out"),
        (["pipeline.num_stages=9"], "6 layers cannot fill 9 stages"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(typed: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, *typed]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_profile_of_a_run_has_no_layers(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile.write_text(Profile(Costs.spread(2), 4).as_json())
    assert main(["plan", *MODEL]) == 2
    assert "it has the times of stages, and a plan needs those of layers" in capsys.readouterr().err


def test_without_a_profile_it_says_how_to_make_one(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile.unlink()
    assert main(["plan", *MODEL]) == 2
    assert "type `pipetrain profile`" in capsys.readouterr().err


def test_a_run_by_other_ranks_does_not_plan() -> None:
    with pytest.raises(ValueError, match=r"plan=auto: `pipetrain train` plans"):
        prepare(load_config([*MODEL, "plan=auto"]))


def test_a_layer_on_the_line_is_never_below_zero() -> None:
    steep = Profile(layers=(layer(0, 9.0, 100, 10, 1),), samples=3, smaller=(layer(0, 1.0, 10, 10, 1),))
    assert steep.at(1).layers[0].forward_seconds == 1.0
    assert dataclasses.replace(steep, samples=9).at(5).layers[0].forward_seconds == 5.0
