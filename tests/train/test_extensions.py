"""Promise: a schedule, an op's function, a tracker and an engine of the user's run by what is typed, and nothing that a run folder names is run."""

import json
import os
import pathlib
import re
import shutil
import sys

import pytest
from commands import begin, end
from small_text import make_text

from pipetrain.cli.main import main

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ALONE = [
    sys.executable, "-m", "pipetrain.train", "experiment=smoke", "data=text", "data.path=text",
    "observe.progress=false",
]  # fmt: skip
TWO_STAGES = ["pipeline.num_stages=2", "pipeline.stages_per_rank=2"]
TYPED = [
    "pipeline.schedule=own_op:with_norms", "pipeline.on_call=own_op:write_norm",
    "observe.trackers=[own_tracker:Losses]", "engine.name=own_engine:WithAverage",
]  # fmt: skip
NAMED = ["pipeline.schedule=halves", "observe.trackers=[losses]", "engine.name=averaged"]
ENTRY_POINTS = """
[pipetrain.schedules]
halves = own_schedule:two_flushes
[pipetrain.trackers]
losses = own_tracker:Losses
[pipetrain.engines]
averaged = own_engine:WithAverage
[pipetrain.op_handlers]
norms = own_op:write_norm
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with three runs: of the examples in it, of the same as a package installs them, and of neither."""
    folder = tmp_path_factory.mktemp("extended")
    make_text(folder / "text")
    installed = folder / "installed"
    for where in (folder, installed):
        where.mkdir(exist_ok=True)
        for file in EXAMPLES.glob("own_*.py"):
            shutil.copy(file, where)
    metadata = installed / "extended-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extended\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(EXAMPLES.parent), str(installed)])
    runs = [
        begin(folder, [*ALONE, *TWO_STAGES, *TYPED, "run_dir=typed"]),
        begin(folder, [*ALONE, *TWO_STAGES, *NAMED, "run_dir=named"], PYTHONPATH=path),
        begin(folder, [*ALONE, *TWO_STAGES, "run_dir=plain"]),
    ]
    for run in runs:
        code, said = end(run)
        assert code == 0, said
    for file in folder.glob("own_*.py"):
        file.unlink()  # what is read of the runs from here on imports nothing of it
    return folder


@pytest.mark.parametrize("name", ["own_schedule", "own_op", "own_tracker", "own_engine"])
def test_an_extension_is_thirty_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 30


def losses_of(run: pathlib.Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["typed", "named"])
def test_what_is_named_runs_and_changes_no_loss(folder: pathlib.Path, name: str) -> None:
    losses = losses_of(folder / "plain")
    assert losses_of(folder / name) == losses
    written = (folder / name / "losses.csv").read_text().splitlines()
    assert written == [f"{step},{loss}" for step, loss in enumerate(losses, start=1)]
    held_out = [json.loads((folder / run / "report.json").read_text())["heldout_loss"] for run in (name, "plain")]
    assert held_out[0] > held_out[1]  # the average of the weights is behind them


def test_the_schedules_are_those_of_the_functions(folder: pathlib.Path) -> None:
    assert "1B3,1CALL3," in (folder / "typed" / "schedule.csv").read_text()
    order = [cell for cell in (folder / "named" / "schedule.csv").read_text().strip().split(",") if "R" not in cell]
    assert order[:8] == ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]


def test_the_function_of_an_op_runs_once_a_step_and_sees_the_gradients(folder: pathlib.Path) -> None:
    norms = [list(map(float, (folder / f"norms-of-stage-{stage}.txt").read_text().split())) for stage in (0, 1)]
    whole = [json.loads(line)["grad_norm"] for line in (folder / "typed" / "metrics.jsonl").read_text().splitlines()]
    assert [(first**2 + second**2) ** 0.5 for first, second in zip(*norms, strict=True)] == pytest.approx(whole)


def test_a_run_folder_names_code_that_nobody_imports(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "own_op.py").write_text("raise SystemExit('imported')\n")
    assert "own_op:with_norms" in (folder / "typed" / "config.yaml").read_text()
    for command in (["report", "typed"], ["report", "typed", "plain"], ["generate", "typed", "--max-new-tokens=2"]):
        assert main(command) == 0, capsys.readouterr().err
    (folder / "own_op.py").unlink()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("pipeline.schedule=own_schedul:two_flushes", "there is no module 'own_schedul' in .*; did you mean 'own_schedule'"),
        ("pipeline.schedule=own_schedule:two_flush", "own_schedule has no 'two_flush'; did you mean 'two_flushes'"),
        ("pipeline.schedule=gpip", "allowed are gpipe, .* a path ending in .csv or MODULE:FUNCTION; did you mean 'gpipe'"),
        ("pipeline.schedule=own_schedule:Op", "generator Op: TypeError: .* missing 1 required positional argument"),
        ("pipeline.schedule=builtins:str", "generator str: gave a str; allowed is a list with a list of ops for each rank"),
        ("pipeline.schedule=own_op:with_norms", "0CALL3: pipeline.schedule=with_norms calls a function; give it, as in pipeline.on_call="),
        ("pipeline.on_call=own_op:write", "pipeline.on_call=own_op:write: own_op has no 'write'; did you mean 'write_norm'"),
        ("pipeline.on_call=norms", "pipeline.on_call=norms: installed are none; write MODULE:FUNCTION"),
        ("observe.trackers=[own_tracker:Lost]", r"observe.trackers=own_tracker:Lost: own_tracker has no 'Lost'"),
        ("engine.name=own_engine:Averaged", "engine.name=own_engine:Averaged: own_engine has no 'Averaged'"),
        ("engine.name=nativ", "engine.name=nativ: allowed are native, deepspeed, MODULE:CLASS .*; did you mean 'native'"),
    ],
    )  # fmt: skip
def test_what_is_not_there_is_told_before_a_process_starts(
    typed: str, said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in EXAMPLES.glob("own_*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["train", "experiment=smoke", "pipeline.num_stages=2", typed]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(said, line), line
    assert not (tmp_path / "runs").exists()
