"""The command line: exit codes, one clear message, and nothing heavy loaded for it."""

import json
import pathlib
import resource
import subprocess
import sys

import pytest
import torch.distributed as dist
from claims import claim_elsewhere

from pipetrain import train as rank
from pipetrain.cli.main import COMMANDS, main
from pipetrain.launcher import launch

SHOWN = "step_seconds bound_seconds bubble_fraction recompute_hidden_seconds recompute_exposed_seconds peak_sets peak_stash ops"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "pipeline.num_stages=4"], 0),
        (["train", "recompute.mod=inline"], 2),
        (["train", "model.num_attention_heads=3"], 2),
        (["train", "resume=nowhere"], 2),
        (["--help"], 0),
    ],
    ids=["show", "unknown key", "model", "resume", "help"],
)
def test_light_commands_are_fast_and_need_no_torch(arguments: list[str], code: int) -> None:
    program = f"import sys; from pipetrain.cli.main import main; code = main({arguments}); print('torch' in sys.modules); sys.exit(code)"
    before = processor_seconds_of_children()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert processor_seconds_of_children() - before < 2.0  # what another test takes meanwhile does not count


def processor_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: pipetrain {command}")
    assert main(["--help"]) == 0
    assert f"  {command}" in capsys.readouterr().out


def test_benchmarks_have_their_own_options(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipetrain").mkdir()
    monkeypatch.setattr(
        "pipetrain.config.read_files.__file__", str(tmp_path / "pipetrain" / "config" / "read_files.py")
    )
    assert main(["bench"]) == 2  # there are none
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("")
    (tmp_path / "benchmarks" / "command.py").write_text("def main(words):\n    return len(words)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("benchmarks", "benchmarks.command"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert main(["bench", "overlap", "--rounds=3", "--help"]) == 3
    for module in ("benchmarks", "benchmarks.command"):
        monkeypatch.delitem(sys.modules, module)


def test_json_on_stdout_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json", "pipeline.num_stages=3", "recompute.mode=inline"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == set(SHOWN.split())
    assert len(shown["peak_sets"]) == 3
    assert set(shown["ops"][0]) == {"rank", "lane", "op", "start", "end"}


def test_json_in_a_file_leaves_the_drawing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "show.json"
    assert main(["show", f"--json={file}", "cost.hop_seconds=0.5"]) == 0
    assert "rank 0 F0" in capsys.readouterr().out
    assert json.loads(file.read_text())["step_seconds"] > 0


def test_a_schedule_goes_to_a_file_and_comes_back(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.csv"
    options = ["pipeline.num_stages=4", "recompute.mode=inline"]
    seconds = step_seconds(capsys, *options, f"--out={file}", "pipeline.schedule=1f1b")
    assert step_seconds(capsys, *options, f"pipeline.schedule={file}") == seconds


def step_seconds(capsys: pytest.CaptureFixture[str], *overrides: str) -> float:
    assert main(["show", "--json", *overrides]) == 0
    seconds: float = json.loads(capsys.readouterr().out)["step_seconds"]
    return seconds


def test_costs_reach_the_simulation(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_seconds(capsys) == 32.0  # (m + p - 2)(f + b + r): with two stages nothing can be hidden
    # rank 1 runs 8 x (2 + 2) from 1 to 33, then rank 0 its last B
    assert step_seconds(capsys, "cost.forward_seconds=[1,2]") == 35.0
    # rank 1 runs 8 x 3 from 4 to 28, the last gradient arrives at 31, then a B
    assert step_seconds(capsys, "cost.hop_seconds=3") == 33.0
    file = tmp_path / "split.csv"
    file.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    split = [f"pipeline.schedule={file}", "pipeline.num_microbatches=1", "recompute.mode=never"]
    costs = ([], ["cost.input_gradient_seconds=3"], ["cost.weight_gradient_seconds=[5,1]"])
    # 2 F, 2 I and the W of stage 0, one after the other; I and W take half of B each
    assert [step_seconds(capsys, *split, *cost) for cost in costs] == [5.0, 9.0, 9.0]


@pytest.mark.parametrize("command", ["launcher", "rank"])
def test_a_folder_that_another_run_has_claimed(
    command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a process starts where the other run is there already, and by rank 0 where both have just begun."""
    (tmp_path / "text.txt").write_text("a stage waits for a stage that runs " * 500)
    (tmp_path / "run").mkdir()
    options = ["experiment=smoke", "data=text", f"data.path={tmp_path / 'text.txt'}", f"run_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("processes were started"))
    other = claim_elsewhere(tmp_path / "run")
    try:
        if command == "launcher":
            code = main(["train", *options])
        else:
            code = rank.main([*options, "pipeline.num_stages=1", "steps=1", "observe.progress=false"])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        other.communicate("end\n")
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"another run is in this folder (process {other.pid} on " in line
    assert list((tmp_path / "run").iterdir()) == []
