"""Ranks report what ran when so often that it costs little; loss, rate and norm are written after each step."""

from __future__ import annotations

import json
import pathlib
import time

import pytest

from pipetrain.config.load import load_config
from pipetrain.launcher.outcome import Exit
from pipetrain.train import train
from pipetrain.trainer import steps
from pipetrain.trainer.steps import FIRST_STEPS, Reports


def computes(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def after_first_steps(*, is_first: bool, costs: float, seconds: float) -> tuple[Reports, list[int]]:
    """Reports that cost so much, of steps that take so long; and what this rank gave when the ranks agreed."""
    given: list[int] = []

    def agree(value: int) -> int:
        given.append(value)
        return value or 7  # of rank 0

    reports = Reports(agree, is_first=is_first)
    for step in range(1, FIRST_STEPS + 1):
        assert reports.are_due(step)
        with reports.working():
            computes(costs)
        reports.end_step(seconds)
    return reports, given


def test_a_report_that_costs_a_tenth_of_a_step_comes_after_every_tenth() -> None:
    reports, given = after_first_steps(is_first=True, costs=0.002, seconds=0.02)
    assert len(given) == 1
    assert 10 <= given[0] < 20  # of what computes beside the loop
    every = given[0]
    assert [step for step in range(11, 60) if reports.are_due(step)] == [
        step for step in range(11, 60) if not step % every
    ]
    reports.end_step(1e-9)
    assert len(given) == 1, "it is fixed once"


def test_one_that_costs_little_comes_after_each_step() -> None:
    reports, given = after_first_steps(is_first=True, costs=0.0, seconds=0.6)
    assert given == [1]
    assert all(map(reports.are_due, range(11, 50)))


def test_another_rank_does_as_rank_0_says() -> None:
    reports, given = after_first_steps(is_first=False, costs=0.002, seconds=0.02)
    assert given == [0]
    assert [step for step in range(11, 30) if reports.are_due(step)] == [14, 21, 28]


def test_between_two_reports_the_figures_that_each_rank_knows_are_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MOST_SHARE", 1e-9)
    phases = "phases=[{from:0},{from:14,recompute:{mode:never}}]"
    run = [
        "experiment=smoke", "steps=22", "observe.progress=false", f"run_dir={tmp_path}/run", "pipeline.num_stages=1",
        phases,
    ]  # fmt: skip
    assert train(load_config(run)).code is Exit.DONE
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 23))
    assert all(line[key] > 0 for line in lines for key in ("loss", "lr", "grad_norm", "tokens_per_second"))
    reported = [line["step"] for line in lines if line["bubble_fraction"] is not None]
    # The first ones, the last one of each phase, and those that predict the step of the second phase.
    assert reported == [*range(1, 11), 14, 16, 17, 18, 22]
    assert [line["step_seconds"] is not None for line in lines] == [line["step"] in reported for line in lines]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["step_seconds_measured"] > 0
    assert report["step_seconds_predicted"] > 0
    assert report["peak_activation_bytes"][0] > 0
    page = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert page["steps"][-1]["step"] == 22
