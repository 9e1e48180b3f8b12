"""A run's page shows what a schedule's page shows: both steps with their memory, the recorded steps, and where the recomputation went."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import drawn_in, panels_in
from shows import show
from test_report import REPORT

from pipetrain.monitor.draw.page import html
from pipetrain.monitor.recorded import RecordedSteps, layers_of_stages, page_of_run
from pipetrain.monitor.shown import Shown
from pipetrain.monitor.step_report import RankReport, Report
from pipetrain.plan.plan import Plan

MEASURED = show(num_stages=4, num_microbatches=8, recompute="inline")
PREDICTED = show(num_stages=4, num_microbatches=8)
TEXT = "</script><img src=x onerror=alert(1)>\U0001f600\x1b[31m\x00"


def report_of(shown: Shown = MEASURED, step: int = 200) -> Report:
    """The step of `shown` as its ranks report it."""
    sizes: dict[str, Any] = {"set_bytes": 4_000_000, "input_bytes": 250_000, "limit_bytes": 80_000_000_000}
    ranks = (
        RankReport(rank, step, shown.timeline.of_rank(rank), 7_000_000, 9_000_000, None, 2e-6, stages=(rank,), **sizes)
        for rank in range(shown.schedule.num_ranks)
    )
    return Report.of(ranks, shown.schedule)


def recorded_in(folder: Path, title: str = "a run", layers: Sequence[str] = ()) -> RecordedSteps:
    recorded = RecordedSteps(folder / "timeline.json")
    recorded.start(title, layers)
    return recorded


def steps_in(folder: Path) -> list[int]:
    return [one["step"] for one in json.loads((folder / "timeline.json").read_text())["steps"]]


def page_of(folder: Path, *, predicted: bool = True, report: Any = REPORT, title: str = "quickstart") -> str:
    path = folder / "timeline.json"
    recorded_in(folder, title).finish(
        path, report, report_of(), [MEASURED], PREDICTED if predicted else None, range(2, 5)
    )
    return page_of_run(path, folder / "metrics.jsonl")


def test_both_steps_have_their_ops_and_their_memory(tmp_path: Path) -> None:
    text = page_of(tmp_path)
    above, below = panels_in(text)
    assert (above["name"], below["name"]) == ("Predicted from the op times of steps 2 to 4", "Measured, step 200")
    for panel, one in ((above, PREDICTED), (below, MEASURED)):
        ops = {(rank, op): (start, start + took) for rank, _, op, start, took in panel["ops"]}
        assert ops == {(event.rank, str(event.op)): (event.start, event.end) for event in one.timeline.events}
        assert [max(held for _, held in curve) for curve in panel["held"]] == [rank.peak_sets for rank in one.breakdown]
        assert [sum(parts) for parts in panel["parts"]] == pytest.approx([one.step_seconds] * 4)
        exposed = [sum(end - start for rank, start, end in panel["exposed"] if rank == place) for place in range(4)]
        assert exposed == [rank.recompute_exposed_seconds for rank in one.breakdown]
    assert not re.search(r"(src|href)=|url\(http|@import", text)
    script = text[text.rindex("<script>") :]
    assert html(PREDICTED).endswith(script), "the page of a schedule has the same script"
    text = page_of(tmp_path, predicted=False)
    assert "Predicted" not in text
    assert len(panels_in(text)) == 1


def test_memory_is_measured_in_bytes_beside_what_the_device_has(tmp_path: Path) -> None:
    recorded = recorded_in(tmp_path)
    recorded.add(1, report_of())
    (panel,) = panels_in(page_of_run(tmp_path / "timeline.json", tmp_path / "metrics.jsonl"))
    assert panel["bytes"]
    assert (panel["peak"], panel["limit"]) == ([7e6] * 4, [8e10] * 4)
    # A set, and the stored inputs of the seven other microbatches; the last rank keeps its set and stores none.
    assert [max(held for _, held in curve) for curve in panel["held"]] == [4e6 + 7 * 250e3] * 3 + [4e6]


def test_text_of_the_drawing_ends_no_element(tmp_path: Path) -> None:
    """Nor the names of the run, of ops, ranks and stages, whatever a folder holds."""
    text = page_of(tmp_path, report=dataclasses.replace(REPORT, schedule=TEXT, skipped_steps=3), title=TEXT)
    assert not {"\x1b", "\x00"} & set(text)
    assert "<img" not in text
    assert "\U0001f600" in text
    assert "Steps skipped because of their loss or gradient: 3." in text
    path = tmp_path / "timeline.json"
    values = json.loads(path.read_text())
    for panel in (values["fixed"][0], values["steps"][0]["panels"][0]):
        panel["name"] = panel["facts"] = panel["ranks"][0] = panel["ops"][0][2] = TEXT
    values["stages"] = [TEXT] * 4
    path.write_text(json.dumps(values))
    text = page_of_run(path, tmp_path / "metrics.jsonl")
    assert "<img" not in text
    assert drawn_in(text)["stages"] == [TEXT] * 4
    assert panels_in(text)[0]["name"] == TEXT


def test_what_is_no_page_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for text, words in (
        (None, "there is no such file"),
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"format_version": 99}', "format_version=99, this pipetrain reads 1"),
        ('{"format_version": 1}', "this is not a file of recorded steps"),
        (
            '{"format_version": 1, "title": "", "fixed": [NaN], "steps": [], "stages": [], "sections": []}',
            "not a file of",
        ),
        (
            '{"format_version": 1, "title": "", "fixed": [], "steps": [], "stages": [], "sections": [1]}',
            "not a file of",
        ),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=words):
            page_of_run(path, tmp_path / "metrics.jsonl")


def test_figures_over_steps_are_thinned_and_lack_what_is_no_number(tmp_path: Path) -> None:
    page_of(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": None if step == 2 else 1.0 * step} for step in range(1, 5001)]
    text = "".join(json.dumps(line) + "\n" for line in lines).replace('"loss": 3.0', '"loss": NaN')
    metrics.write_text(text + '{"step": 5001, "lo')
    charts = drawn_in(page_of_run(tmp_path / "timeline.json", metrics))["charts"]
    assert charts["lines"][0]["name"] == "loss"
    losses = dict(zip(charts["steps"], charts["lines"][0]["values"]))
    assert 500 < len(losses) <= 1002
    assert (min(losses), max(losses)) == (1, 5000)
    assert all(loss == step for step, loss in losses.items() if step > 3)
    assert all(losses.get(step) is None for step in (2, 3))
    assert max(after - before for before, after in zip(charts["steps"], charts["steps"][1:])) <= 8


def test_steps_are_thinned_where_they_would_fill_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = len(MEASURED.timeline.events)
    monkeypatch.setattr("pipetrain.monitor.recorded._MOST_OPS", 4 * ops)
    monkeypatch.setattr("pipetrain.monitor.recorded._SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("pipetrain.monitor.recorded._MOST_SHARE", 1e9)
    recorded = recorded_in(tmp_path)
    for step in range(1, 5):
        recorded.add(step, report_of(step=step))
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    recorded.add(5, report_of(step=5))
    assert steps_in(tmp_path) == [1, 3, 5]
    recorded.rewind(4)
    recorded.add(4, report_of(step=4))
    assert steps_in(tmp_path) == [1, 3, 4]


def test_a_step_is_recorded_when_it_is_time_to(tmp_path: Path) -> None:
    """The first three, then none before five seconds are over."""
    recorded = recorded_in(tmp_path)
    for step in range(1, 6):
        recorded.add(step, report_of(step=step))
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_full_disk_ends_no_run_and_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = recorded_in(tmp_path / "gone")
    for step in (1, 2):
        recorded.add(step, report_of(step=step))
    (line,) = capsys.readouterr().err.splitlines()
    assert "timeline.json lacks steps from here on (No such file or directory)" in line


def test_a_step_too_large_for_a_page_is_not_recorded_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetrain.monitor.recorded._MOST_OPS", len(MEASURED.timeline.events) - 1)
    recorded = recorded_in(tmp_path)
    recorded.add(1, report_of())
    assert not (tmp_path / "timeline.json").exists()
    recorded.finish(tmp_path / "timeline.json", REPORT, report_of(), [MEASURED], None, range(2, 5))
    assert steps_in(tmp_path) == [200]


def test_a_stage_is_named_by_its_layers() -> None:
    plan = Plan((3, 1, 2), (0, 1, 2), 4)
    assert layers_of_stages(plan, ()) == ["0 to 2", "3", "4 to 5"]
    kinds = ("embedding", "block", "block", "block", "block", "head")
    assert layers_of_stages(plan, kinds) == ["0 to 2 (embedding, 2 x block)", "3 (block)", "4 to 5 (block, head)"]
