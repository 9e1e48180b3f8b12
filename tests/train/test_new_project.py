"""A project of your own: `pipetrain new` writes one that trains, verifies, sweeps and exports; its code runs only where it is typed."""

import json
import pathlib
import re
import shlex
import sys

import pytest
from commands import complete
from safetensors.torch import load_file

from pipetrain.cli.main import main

COMMAND = [sys.executable, "-m", "pipetrain.cli"]


def test_a_new_project_trains_and_its_results_are_read_without_its_code(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "first"
    assert main(["new", str(project)]) == 0
    assert sum(len(file.read_text().splitlines()) for file in project.iterdir()) <= 60
    assert main(["new", str(project)]) == 2
    assert "it is there already" in capsys.readouterr().err
    done = complete(project, [*COMMAND, "train", "observe.progress=false", "steps=6", "run_dir=run"])
    assert done.returncode == 0, done.stderr
    assert "pipetrain.yaml of this folder is used" in done.stderr
    for code in ("model.py", "data.py", "pipetrain.yaml"):
        (project / code).write_text("raise SystemExit('somebody ran it')")  # also no configuration
    monkeypatch.chdir(tmp_path)
    assert main(["report", "first/run"]) == 0
    assert "first: 6 steps" in capsys.readouterr().out
    assert main(["generate", "first/run", "--prompt=x"]) == 2
    assert "this is model=python" in capsys.readouterr().err
    assert main(["export", "first/run", "--out=x"]) == 2
    assert "--format=safetensors writes its weights" in capsys.readouterr().err
    assert main(["export", "first/run", "--format=safetensors", "--out=w.safetensors"]) == 0
    assert {"0.weight", "6.1.bias", "7.bias"} <= set(load_file("w.safetensors"))


@pytest.mark.slow
def test_its_own_test_is_green(tmp_path: pathlib.Path) -> None:
    project = tmp_path / "first"
    assert main(["new", str(project)]) == 0
    done = complete(project, [sys.executable, "-m", "pytest", "-q", "test_model.py"])
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_file_and_the_command_of_the_readme_train(tmp_path: pathlib.Path) -> None:
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    section = readme.partition("## Your own model\n")[2].partition("\n## ")[0]
    ((script, command),) = re.findall(r"```python\n(.+?)```\n\n(?:    .+\n)*?    pipetrain (.+?)\n", section, re.DOTALL)
    (tmp_path / "mine.py").write_text(script)
    done = complete(tmp_path, [*COMMAND, *shlex.split(command), "observe.progress=false", "run_dir=run"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("are balanced by numbers of layers") == 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 100
    assert losses[-1] < 0.7 * losses[0]
