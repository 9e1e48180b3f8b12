"""A file of somebody else's run ends no command with a traceback and keeps none waiting: the answer is a line that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign import REPORT, answers, make_run, pipe_at

from pipetrain.config.read_files import MOST_DEPTH, DamagedFile, fitted, parse_json, read_json
from pipetrain.models.weights import INDEX_OF_SHARDS, SINGLE, read_weights
from pipetrain.monitor.lines import read_lines
from pipetrain.plan.plan import read_plan
from pipetrain.plan.profile import read_profile

Damage = Callable[[Path], object]
DEEP = 100_000


def _changed(**values: object) -> Damage:
    def change(folder: Path) -> None:
        report = json.loads((folder / "report.json").read_text())
        (folder / "report.json").write_text(json.dumps({**report, **values}))

    return change


def _with(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


LAUGHS = "a0: &a0 [x,x]\n" + "".join(f"a{n}: &a{n} [{','.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 12))
ECHOES = "a0: xxxxxxxxxx\n" + "".join(f"a{n}: {10 * f'${{a{n - 1}}}'}\n" for n in range(1, 12))
REPORTS: dict[str, Damage] = {
    "deep": _with("report.json", '{"a":' * DEEP),
    "a little too deep": _with("report.json", "[" * 200 + "]" * 200),
    "a list": _with("report.json", "[1, 2]"),
    "no keys": _with("report.json", '{"format_version": 1}'),
    "no text": lambda folder: (folder / "report.json").write_bytes(b"\xff\xfe\x00"),
    "a pipe": lambda folder: pipe_at(folder / "report.json"),
    "a folder": lambda folder: ((folder / "report.json").unlink(), (folder / "report.json").mkdir()),
    "a link to itself": lambda folder: (
        (folder / "report.json").unlink(),
        (folder / "report.json").symlink_to("report.json"),
    ),
    "a number for a list": _changed(balance=5),
    "a text for a number": _changed(tokens_per_second="many"),
    "a number of 300 digits": _changed(peak_activation_bytes=[10**300]),
    "ranks of another kind": _changed(ranks=[[1]]),
    "phases that are none": _changed(phases=[{"phase": 1}]),
}


@pytest.mark.parametrize("damage", REPORTS.values(), ids=REPORTS)
def test_a_report(damage: Damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run := make_run(tmp_path / "run"))
    code, told = answers(capsys, "report", str(run))
    assert code == 2
    (line,) = told.splitlines()
    assert str(run / "report.json") in line


def test_a_step_that_took_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _changed(step_seconds_measured=0)(run := make_run(tmp_path / "run"))
    assert answers(capsys, "report", str(run))[0] == 0


CONFIGS = {
    "self-multiplying": LAUGHS,
    "self-multiplying by interpolation": ECHOES,
    "deep": "a: " + "[" * DEEP,
    "long": "x" * 2**19,
    "a time": "a: 2001-01-01\n",
    "a number that is none": "steps: 0x\n",
    "two keys": "steps: 1\nsteps: 2\n",
    "a control code": "steps: \x1b\n",
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    (run / "config.yaml").write_text(text)
    code, told = answers(capsys, "report", str(run), str(other))
    assert code == 2
    assert "other" in told, "the run that can be read is shown"


def test_a_configuration_reads_nothing_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    with (run / "config.yaml").open("a") as file:
        file.write("init_from: ${oc.env:A_SECRET}\n")
    text = (run / "config.yaml").read_text().replace("init_from: null\n", "")
    (run / "config.yaml").write_text(text)
    _, told = answers(capsys, "report", str(run), str(other))
    assert "oc.env:A_SECRET" in told
    assert "hunter2" not in told


def test_lines_of_metrics_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    lines = ["[" * DEEP, "5", "{}", '{"step": "x"}', '{"step": 3, "loss": [1]}', "\xff", '{"step": 4, "loss": null}']
    with (run / "metrics.jsonl").open("a", encoding="latin1") as file:
        file.write("\n".join(lines) + "\n")
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert answers(capsys, "report", str(run), f"--out={tmp_path / 'plot.svg'}")[0] == 0


def test_control_codes_of_a_file_are_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J\x1b]0;owned\x07\x9b2K\u202e\ud800quick"
    _changed(experiment=name, schedule=name, recompute_mode="\U0001f600\x00")(run := make_run(tmp_path / "run"))
    code, told = answers(capsys, "report", str(run))
    assert code == 0
    assert r"# \x1b[2J\x1b]0;owned\x07\x9b2K\u202e\ud800quick: 2 steps" in told
    assert "\U0001f600" in told
    in_json = answers(capsys, "report", str(run), "--json")
    _changed(format_version=name)(run)
    refused = answers(capsys, "report", str(run))
    assert (in_json[0], refused[0]) == (0, 2)
    assert r"\x1b[2J" in refused[1]
    assert not set(told + in_json[1] + refused[1]) & {*"\x00\x1b\x07\x9b\u202e"}


PLANS = {
    "deep": "[" * DEEP,
    "a million ranks": '{"balance": [1, 1], "stage_ranks": [0, 1000000], "num_microbatches": 1}',
    "no layers": '{"balance": [], "stage_ranks": [], "num_microbatches": 1, "num_replicas": "x"}',
    "a stage without a rank": '{"balance": [1, 1], "stage_ranks": [0], "num_microbatches": 1}',
    "a key of nobody": '{"balance": [1], "stage_ranks": [0], "num_microbatches": 1, "__class__": 1}',
}


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_a_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"plan\.json cannot be read \(.*\); name another run"):
        read_plan(tmp_path / "plan.json")


PROFILES = {
    "deep": "[" * DEEP,
    "costs of another kind": '{"format_version": 2, "costs": {"forward": "1"}, "num_microbatches": 1}',
    "costs of other stages": '{"format_version": 2, "costs": {"forward": [1, 2], "backward": [1], "recompute": [1, 1], '
    '"hop_forward": [0], "hop_backward": [0]}, "num_microbatches": 1}',
    "layers of another kind": '{"format_version": 2, "costs": null, "layers": [{"numbers": 5}]}',
    "microbatches without end": '{"format_version": 2, "costs": {"forward": [1]}, "num_microbatches": 1e400}',
}


@pytest.mark.parametrize("text", PROFILES.values(), ids=PROFILES)
def test_a_profile(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError, match=r"profile\.json cannot be read \(.*\); name another run"):
        read_profile(str(tmp_path))
    assert answers(capsys, "show", f"plan.profile={tmp_path}")[0] == 2


WEIGHTS: dict[str, Damage] = {
    "an index that is a list": _with(INDEX_OF_SHARDS, "[1, 2]"),
    "a number for a file": _with(INDEX_OF_SHARDS, '{"weight_map": {"a": 5}}'),
    "a file elsewhere": _with(INDEX_OF_SHARDS, '{"weight_map": {"a": "../secret.safetensors"}}'),
    "a deep index": _with(INDEX_OF_SHARDS, "[" * DEEP),
    "a deep header": lambda folder: (folder / SINGLE).write_bytes((2 * DEEP).to_bytes(8, "little") + b"[" * 2 * DEEP),
    "a header without end": lambda folder: (folder / SINGLE).write_bytes(b"\xff" * 8),
    "a pipe": lambda folder: pipe_at(folder / SINGLE),
}


@pytest.mark.parametrize("damage", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(damage: Damage, tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be read|there are no weights"):
        read_weights(tmp_path)


def test_limits_of_the_reader(tmp_path: Path) -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    with pytest.raises(ValueError, match="nested deeper than 64"):
        parse_json("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1))
    assert parse_json("[" + "[], " * 1000 + "[]]")
    (tmp_path / "large.json").touch()
    os.truncate(tmp_path / "large.json", 2**28 + 1)
    with pytest.raises(DamagedFile, match=r"large\.json cannot be read \(it has more than 268,435,456 bytes\); go"):
        read_json(tmp_path / "large.json", "go")
    with pytest.raises(DamagedFile, match=r"/dev/zero cannot be read \(it is no regular file\)"):
        read_json(Path("/dev/zero"), "go")


def test_values_that_no_field_has() -> None:
    assert fitted(type(REPORT), {"experiment": "a"} | json.loads(json.dumps(REPORT.__dict__))) == REPORT
    for kind, value in ((int, True), (int, 1.0), (float, 2**63), (tuple[int, int], [1]), (str, None), (bool, 1)):
        with pytest.raises(ValueError, match="it is"):
            fitted(kind, value)
