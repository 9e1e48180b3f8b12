"""Several runs in one table and one plot; those that cannot be read are named and the rest is shown."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from test_report import REPORT

from pipetrain.cli.main import main
from pipetrain.config.load import as_yaml, load_config
from pipetrain.monitor.folder import SWEEP_JOBS, RunFolder
from pipetrain.monitor.report import write_report


def make_run(path: Path, *overrides: str, loss: float = 2.0) -> str:
    folder = RunFolder(path)
    folder.create()
    folder.config.write_text(as_yaml(load_config([*overrides, f"run_dir={path}"])))
    write_report(folder.report, dataclasses.replace(REPORT, loss=loss))
    folder.metrics.write_text("".join(json.dumps({"step": step, "loss": loss / step}) + "\n" for step in (1, 2, 3)))
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        make_run(tmp_path / "a", "seed=1", "recompute=inline", loss=2.5),
        make_run(tmp_path / "b" / "x", "seed=2", "recompute=inline", "pipeline.balance=[2,4]", "observe=wandb"),
        make_run(tmp_path / "c", "seed=2", "recompute=inline"),
    ]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_per_run_says_what_differs_and_what_came_out(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *runs]) == 0
    text, below = capsys.readouterr().out.split("\n\n")
    head, _, *lines = text.splitlines()
    assert [line.split(":")[0] for line in below.splitlines()] == [f"- {name}" for name in cells(head)]
    table = [dict(zip(cells(head), cells(line))) for line in lines]
    assert [row["run"] for row in table] == ["a", "b/x", "c"]
    assert table[0]["differs in"] == "seed=1 pipeline.balance=auto"
    assert table[1]["differs in"] == "seed=2 pipeline.balance=[2,4]"  # how it was watched is not compared
    assert (table[0]["loss"], table[1]["loss"]) == ("2.500", "2.000")
    assert table[0]["exposed R"] == "0.1250 s"  # of both ranks
    assert table[0]["peak activations"] == "1.5 MB"  # of the rank with most
    assert table[0]["bubble"] == "12.5%"


def test_json_is_a_list(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *runs, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [value["run"] for value in values] == runs
    assert values[1]["differs"] == {"seed": 2, "pipeline.balance": [2, 4]}
    assert values[0]["loss"] == 2.5
    assert main(["report", runs[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == 2.5  # of one run, as ever


def test_losses_in_each_format(runs: list[str], tmp_path: Path) -> None:
    for name in ("x.svg", "x.png", "x.html"):
        assert main(["report", *runs, f"--out={tmp_path / name}"]) == 0
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "x.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "b/x" in page


def test_a_sweep_folder_means_its_jobs(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "sweep" / SWEEP_JOBS
    jobs.mkdir(parents=True)
    for number, run in enumerate(runs[:2]):
        (jobs / f"{number:04d}.json").write_text(json.dumps({"run_dir": run}))
    assert main(["report", str(tmp_path / "sweep"), runs[2], "--json"]) == 0
    assert [value["run"] for value in json.loads(capsys.readouterr().out)] == runs


def test_a_damaged_run_is_named_and_the_others_are_shown(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path(runs[1]) / "report.json"
    damaged.write_text('{"format_version": 1, "ste')
    assert main(["report", *runs]) == 2
    captured = capsys.readouterr()
    assert [cells(line)[0] for line in captured.out.split("\n\n")[0].splitlines()[2:]] == ["a", "c"]
    (line,) = captured.err.splitlines()
    assert str(damaged) in line
    assert main(["report", runs[1]]) == 2
    assert str(damaged) in capsys.readouterr().err


def test_what_is_not_there_and_what_cannot_be_written(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(runs[0]) / "report.json").unlink()
    for arguments, words in (
        ([runs[0], runs[1]], "there is no report; the run is still going on, or it failed"),
        ([runs[1], "nowhere"], "nowhere: there is no run"),
        ([*runs, "--out=x.gif"], ".gif is unknown; allowed are .svg, .png, .html"),
        ([runs[1], f"--out={tmp_path / 'missing' / 'x.svg'}"], "cannot be written"),
    ):
        assert main(["report", *arguments]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
