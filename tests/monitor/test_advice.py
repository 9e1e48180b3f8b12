"""What `report` says to do next: keys to type, each with a gain that the simulator finds too; nothing where nothing helps."""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict

import pytest
from shows import show
from test_report import REPORT

from pipetrain.cli.advice import advice_on
from pipetrain.cli.main import main
from pipetrain.config.load import as_yaml, load_config
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.report import write_report
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import Profile
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import write_csv


def folder_of(path: pathlib.Path, costs: Costs, balance: tuple[int, ...], *keys: str) -> RunFolder:
    """A run of four microbatches that took these costs."""
    stages = len(balance)
    folder = RunFolder(path)
    overrides = [f"pipeline.num_stages={stages}", "pipeline.num_microbatches=4", "data.global_batch_size=4"]
    config = load_config([*overrides, f"model.num_hidden_layers={sum(balance) - 2}", *keys])
    folder.config.write_text(as_yaml(config))
    folder.plan.write_text(json.dumps(asdict(Plan(balance, tuple(range(stages)), 4))))
    folder.profile.write_text(Profile(costs, 4).as_json())
    folder.schedule.write_text(write_csv(show("gpipe", num_stages=stages, num_microbatches=4, costs=costs).schedule))
    write_report(folder.report, REPORT)
    return folder


def test_overlap_is_advised_with_the_gain_that_show_finds(tmp_path: pathlib.Path) -> None:
    costs = Costs.spread(4)
    folder = folder_of(tmp_path, costs, (2, 2, 2, 3), "recompute.mode=inline")
    inline, overlap = (
        show("gpipe", num_stages=4, num_microbatches=4, recompute=mode, costs=costs).step_seconds
        for mode in ("inline", "overlap")
    )
    (found,) = [one for one in advice_on(folder) if one.keys == "recompute.mode=overlap"]
    assert found.gain == pytest.approx(1 - overlap / inline)
    assert f"recompute.mode=overlap: {found.gain:.0%} less time" in str(found)


def test_a_slow_stage_gives_layers_away(tmp_path: pathlib.Path) -> None:
    """Four equal layers on stage 1, two on each other: with three it is no slower than what it feeds."""
    layers = (2, 4, 2, 2)
    costs = Costs.spread(4, forward=layers, backward=[2 * count for count in layers], recompute=layers)
    folder = folder_of(tmp_path, costs, layers, "recompute.mode=never", "model.name=gpt2")
    (found,) = [one for one in advice_on(folder) if one.keys.startswith("pipeline.balance=")]
    balance = json.loads(found.keys.partition("=")[2])
    assert sum(balance) == 10
    assert max(balance) == 3 == balance[1]
    assert found.why == "Stage 1 takes 100% longer than the others do on average"
    assert found.gain > 0.1


def test_at_most_three_lines_the_best_first(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = (2, 6, 2, 2)
    costs = Costs.spread(4, forward=layers, backward=[2 * count for count in layers], recompute=layers, hop=0.5)
    folder_of(tmp_path, costs, layers, "recompute.mode=inline", "data.global_batch_size=8")
    found = advice_on(RunFolder(tmp_path))
    gains = [one.gain for one in found]
    assert len(found) == 3
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.01
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("## What to do next\n\n")[2].splitlines()
    assert lines == [f"- {one}" for one in found]
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert [one["keys"] for one in json.loads(capsys.readouterr().out)["advice"]] == [one.keys for one in found]


def test_none_is_a_good_answer(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch at a time in a pipeline of equal stages: nothing that is tried is quicker."""
    folder = folder_of(tmp_path, Costs.spread(4), (1, 1, 1, 1), "recompute.mode=never")
    assert advice_on(folder) == []
    assert main(["report", str(tmp_path)]) == 0
    assert "What to do next" not in capsys.readouterr().out


def test_without_a_profile_there_is_none(tmp_path: pathlib.Path) -> None:
    """As of deepspeed, of an older version, or of a folder that was damaged."""
    folder = folder_of(tmp_path, Costs.spread(4), (2, 2, 2, 3), "recompute.mode=inline")
    folder.profile.write_text("{")
    assert advice_on(folder) == []
    folder.profile.unlink()
    assert advice_on(folder) == []
