"""What `report` says to do next: keys to type, each with a gain that the simulator finds too; nothing where nothing helps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from random_plans import layer
from shows import show
from test_report import REPORT
from test_run_page import report_of
from test_trackers import METRICS

from pipetrain.cli.advice import advice_on
from pipetrain.cli.main import main
from pipetrain.config.load import as_yaml, load_config, read
from pipetrain.config.records import ObserveConfig
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.recorder import Recorder
from pipetrain.monitor.report import measured_and_predicted, write_report
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import LOSS, Profile, read_profile
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import write_csv
from pipetrain.trainer.prepare import conditions_of


def folder_of(path: Path, costs: Costs, balance: tuple[int, ...], *keys: str) -> RunFolder:
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


def test_overlap_is_advised_with_the_gain_that_show_finds(tmp_path: Path) -> None:
    costs = Costs.spread(4)
    folder = folder_of(tmp_path, costs, (2, 2, 2, 3), "recompute.mode=inline")
    inline, overlap = (
        show("gpipe", num_stages=4, num_microbatches=4, recompute=mode, costs=costs).step_seconds
        for mode in ("inline", "overlap")
    )
    (found,) = [one for one in advice_on(folder) if one.keys == "recompute.mode=overlap"]
    assert found.gain == pytest.approx(1 - overlap / inline)
    assert f"recompute.mode=overlap: {found.gain:.0%} less time" in str(found)


def test_a_slow_stage_gives_layers_away(tmp_path: Path) -> None:
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


def test_at_most_three_lines_the_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_none_is_a_good_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch at a time in a pipeline of equal stages: nothing that is tried is quicker."""
    folder = folder_of(tmp_path, Costs.spread(4), (1, 1, 1, 1), "recompute.mode=never")
    assert advice_on(folder) == []
    assert main(["report", str(tmp_path)]) == 0
    assert "What to do next" not in capsys.readouterr().out


def test_without_a_profile_there_is_none(tmp_path: Path) -> None:
    """As of deepspeed, of an older version, or of a folder that was damaged."""
    folder = folder_of(tmp_path, Costs.spread(4), (2, 2, 2, 3), "recompute.mode=inline")
    folder.profile.write_text("{")
    assert advice_on(folder) == []
    folder.profile.unlink()
    assert advice_on(folder) == []


def test_another_plan_is_advised_by_the_times_of_the_run(tmp_path: Path) -> None:
    """Layers were equal when they were measured; in the run those of stage 1 took four times as long."""
    costs = Costs.spread(4, forward=[2, 8, 2, 2], backward=[4, 16, 4, 4], recompute=[2, 8, 2, 2])
    folder = folder_of(tmp_path, costs, (2, 2, 2, 2), "recompute.mode=never")
    assert not any(one.why.startswith("Another plan") for one in advice_on(folder))
    layers = (*(layer(number, 1.0, 100, 10, 8) for number in range(8)), layer(8, 0.0, 10, 10, 0, LOSS))
    folder.layers.write_text(Profile(conditions=conditions_of(read(folder.config)), layers=layers, samples=1).as_json())
    first, *_ = advice_on(folder)
    assert first.why == "Another plan, by the op times of this run"
    assert first.gain >= 0.03
    assert f"plan.profile={folder.layers}" in first.keys or "pipeline.balance=" in first.keys


def profile_after(path: Path, slowness: Sequence[float]) -> Costs:
    """What profile.json says after steps that took so many times as long as the simulated one."""
    folder = RunFolder(path)
    (path / "events").mkdir()
    recorder = Recorder(folder, 0, ObserveConfig(progress=False), num_steps=len(slowness), keep=range(2, 5))
    recorder.start(
        "",
        {"experiment": "smoke"},
        (Plan((2, 2, 2, 2), (0, 1, 2, 3), 4), show(num_stages=4, num_microbatches=4).schedule),
    )
    for step, times in enumerate(slowness, start=1):
        costs = Costs.spread(4, forward=times, backward=2 * times, recompute=times)
        last = report_of(show(num_stages=4, num_microbatches=4, costs=costs), step)
        recorder.end_step(step, replace(METRICS, step=step), last)
    recorder.finish(REPORT, *measured_and_predicted(last.schedule, last, []), last)
    recorder.close()
    costs = read_profile(str(folder.profile)).costs
    assert costs is not None
    return costs


def test_a_last_step_like_no_other_changes_no_advice(tmp_path: Path) -> None:
    """The op times are medians of the newest steps; those of the start, which warm up, are forgotten."""
    costs = profile_after(tmp_path, [9.0] * 9 + [1.0] * 8 + [50.0])
    assert costs.forward == pytest.approx((1.0,) * 4)
    assert costs.backward == pytest.approx((2.0,) * 4)
    assert costs.set_bytes == (4e6,) * 4
