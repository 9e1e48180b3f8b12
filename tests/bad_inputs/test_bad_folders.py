"""A wrong run folder, snapshot or file of weights gets one line that helps, and so does a snapshot that was harmed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from bad_rows import ENOUGH, Check, Prepare, Row, a_run, answer, files, train
from safetensors.torch import save_file
from torch import zeros

from pipetrain import train as rank
from pipetrain.verify.drill import flip


def weights_of_another_model(folder: Path) -> None:
    save_file({"0.weight": zeros(3, 3)}, folder / "other.safetensors")


RUN_FOLDERS = [
    train("run_dir={}/file", "run_dir={}/file", "this is a file", prepare=files(file=b"x")),
    train("run_dir={}/file/run", "run_dir={}/file/run", "{}/file is a file", prepare=files(file=b"x")),
    train("run_dir={}/run", "there is a run in this folder", prepare=a_run),
    train(
        "run_dir={}/run",
        "run_dir={}/run",
        "may not be written",
        prepare=lambda folder: folder.chmod(0o555),
        as_nobody=True,
    ),
    train("resume=auto", "resume=auto", "run_dir=PATH"),
    train("resume=nowhere", "resume=nowhere: there is nothing", "snapshots/step-"),
    train("init_from=nowhere", "init_from=nowhere: there is nothing"),
    train("resume={} init_from={}", "a resumed run has its weights"),
    *(
        train(
            f"{key}={{}}/step-00000100",
            f"{key}={{}}/step-00000100: manifest.json is missing in it",
            prepare=lambda folder: (folder / "step-00000100").mkdir(),
        )
        for key in ("resume", "init_from")
    ),
]

ANOTHER = "data=text data.path={}/text experiment=smoke pipeline.num_stages=1 observe.progress=false run_dir={}/new"


def as_rank(typed: str, *says: str, prepare: Prepare = lambda folder: None) -> Row:
    return Row(f"{ANOTHER} {typed}", says, prepare, as_rank=True)


WEIGHTS = "weights/rank-0000.safetensors"
SNAPSHOTS = [
    replace(
        as_rank(""),
        typed=ANOTHER.replace("{}/new", "{}/new/" + 256 * "n"),
        says=("run_dir={}/new/nn", "cannot be made"),
    ),
    as_rank("resume={}", "there is no snapshot"),
    as_rank("resume={}/text/a.txt", "{}/text/a.txt: there is no snapshot"),
    as_rank("init_from={}", "there is no snapshot"),
    as_rank("init_from={}/text/a.txt", "{}/text/a.txt cannot be read (it is no safetensors file"),
    as_rank("init_from={}/other.safetensors", "weights are of another model", prepare=weights_of_another_model),
    as_rank("resume={}/old seed=5", "seed=5", "had 0", "set seed=0", "init_from="),
    as_rank("resume={}/old model.hidden_size=64", "model.hidden_size=64", "had 32", "init_from="),
    as_rank("resume={}/old model.num_hidden_layers=3", "model.num_hidden_layers=3", "had 2"),
    as_rank("resume={}/old data.global_batch_size=4", "data.global_batch_size=4", "had 8"),
    as_rank("resume={}/old steps=1", "steps=1", "has 2 steps behind it", "set steps to 2 or more"),
    as_rank("resume={}/old/snapshots/step-00000009", "step-00000009: there is nothing"),
]


def harmed(what: str, harm: Prepare, *says: str) -> list[Row]:
    """A snapshot that is harmed: named by the user, and as the only one of a run that goes on by itself."""

    def prepare(folder: Path) -> None:
        harm(folder / "old" / "snapshots" / "step-00000002")

    named = replace(as_rank("resume={}/old/snapshots/step-00000002", *says, prepare=prepare), note=what)
    alone = replace(named, typed=named.typed.replace("/new", "/old").rpartition(" ")[0] + " resume=auto")
    return [named, replace(alone, says=(*says, "no snapshot in", "is whole", "choose another run_dir"))]


HARMED = [
    *harmed("manifest gone", lambda snapshot: (snapshot / "manifest.json").unlink(), "manifest.json is missing"),
    *harmed(
        "manifest text", lambda snapshot: (snapshot / "manifest.json").write_text("[1]"), "manifest.json cannot be"
    ),
    *harmed("data flipped", lambda snapshot: flip(snapshot / WEIGHTS, -1), f"{WEIGHTS} has changed"),
    *harmed("data cut", lambda snapshot: os.truncate(snapshot / WEIGHTS, 1000), f"{WEIGHTS} has 1000 bytes"),
    *harmed("file gone", lambda snapshot: (snapshot / "generators" / "rank-0000.safetensors").unlink(), "No such file"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a snapshot, by one rank in this process."""
    folder = tmp_path_factory.mktemp("trained")
    ENOUGH(folder)
    options = ANOTHER.replace("{}/new", "{}/old").replace("{}", str(folder))
    assert rank.main([*options.split(), "steps=2", "snapshot.every_steps=2"]) == 0
    return folder


@pytest.mark.parametrize("row", [*RUN_FOLDERS, *SNAPSHOTS, *HARMED], ids=lambda row: row.name)
def test_the_answer_is_one_line_that_helps(row: Row, check: Check) -> None:
    check(row)


def test_a_fault_that_cannot_be_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPETRAIN_FAULTS", "kil rank=1 op=1B1 step=3")
    options = ANOTHER.replace("{}/new", str(tmp_path / "new")).replace("{}", str(trained))
    assert answer(Row(options, (), as_rank=True), tmp_path) == 2
    assert "PIPETRAIN_FAULTS: there is no 'kil'" in capsys.readouterr().err
