"""Real runs with real wandb and TensorBoard files, read back: nothing is lost, no data leaves the machine, no process is left running."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import wandb_log
from commands import PIPETRAIN, Process, begin, children_of, end, environment, is_alive, wait_until
from pages import panels_in
from ranks import PATIENCE_SECONDS
from resumed import metrics_of, num_steps_of
from small_text import make_text

ALONE = [sys.executable, "-m", "pipetrain.train", "pipeline.num_stages=1", "recompute=never"]
TINY = ["experiment=smoke", "data=text", "data.path=text", "observe=wandb", "observe.progress=false"]
KEY = "f00dfeed" * 5  # of the form of a wandb key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tracked")
    make_text(folder / "text")
    return folder


def start(folder: pathlib.Path, command: list[str], name: str, *options: str, **variables: str) -> Process:
    home = folder / f"home-of-{name}"  # no key of the machine that runs the tests
    home.mkdir(exist_ok=True)
    ours = {"HOME": str(home), "MPLCONFIGDIR": str(folder / "matplotlib")}
    return begin(folder, [*command, *TINY, f"run_dir={name}", *options], **ours, **variables)


def family_of(pid: int) -> list[int]:
    """The process and all that it started, and they."""
    return [pid, *(grandchild for child in children_of(pid) for grandchild in family_of(child))]


def name_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def assert_gone(pids: list[int]) -> None:
    """Processes that have ended, whether or not somebody has asked how."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"left running: {[(pid, name_of(pid)) for pid in left]}"
        time.sleep(0.05)


def stop_at_random(folder: pathlib.Path, process: Process, name: str, chance: random.Random) -> None:
    """SIGTERM to every process of the run, as SLURM does, at a random moment after a random step."""
    step = chance.randint(1, 30)
    wait_until(lambda: num_steps_of(folder / name) >= step, process)
    time.sleep(chance.uniform(0.0, 0.05))  # any moment of a step
    for pid in family_of(process.pid):
        os.kill(pid, signal.SIGTERM)


def assert_nothing_lost(run: pathlib.Path) -> int:
    """Every step is in wandb's file, with its loss; returns how many there are."""
    lines = metrics_of(run)
    rows = wandb_log.rows(wandb_log.newest(run))
    assert [row["_step"] for row in rows] == [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [row["loss"] for row in rows] == [line["loss"] for line in lines]
    return len(lines)


@pytest.mark.slow
def test_sigterm_loses_no_row_and_the_key_is_told_to_nobody(folder: pathlib.Path) -> None:
    """Of a rank alone, and of two under their launcher."""
    chance = random.Random(1)
    commands = {"alone": ALONE, "launched": PIPETRAIN}
    names = [*commands]
    runs = [start(folder, commands[name], name, "steps=100000", WANDB_API_KEY=KEY) for name in names]
    families = []
    for name, process in zip(names, runs):
        wait_until(lambda name=name: num_steps_of(folder / name) >= 1, process)
        family = family_of(process.pid)
        assert "wandb-core" in map(name_of, family)  # it gets the signal, too
        families += family
        stop_at_random(folder, process, name, chance)
    for name, process in zip(names, runs):
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 75, stderr
        assert 0 < assert_nothing_lost(folder / name) < 100000
        assert stderr.startswith("pipetrain: stopped by SIGTERM"), stderr  # and no word of wandb
        assert KEY not in stdout + stderr
        assert [file for file in files_of(folder / name) if KEY.encode() in file.read_bytes()] == []
    assert_gone(families)


def files_of(run: pathlib.Path) -> list[pathlib.Path]:
    found = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in found)
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_same_one_with_every_step(folder: pathlib.Path) -> None:
    """Killed within a second after its last rows, wandb lacks some; what goes on writes them again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["snapshot.every_steps=5", "observe.tensorboard=true", "observe.eval_every_steps=5"]
    options += ["observe.wandb.name=mine", "observe.wandb.group=ours", "observe.wandb.tags=[small,tried]"]
    process = start(folder, ALONE, "killed", "steps=100000", *options)
    wait_until(lambda: (folder / "killed" / "snapshots" / "step-00000010").is_dir(), process)
    families = family_of(process.pid)
    process.kill()
    end(process)
    run_id = (folder / "killed" / "wandb" / "run-id").read_text()
    steps = num_steps_of(folder / "killed") + 5
    code, stderr = end(start(folder, ALONE, "killed", f"steps={steps}", "resume=auto", *options))
    assert code == 0, stderr
    assert "going on from" in stderr
    assert assert_nothing_lost(folder / "killed") == steps
    rows = wandb_log.rows(wandb_log.newest(folder / "killed"))
    evaluated = {row["_step"] for row in rows if "heldout_loss" in row}
    assert evaluated == {*range(5, steps, 5), steps}
    told = [
        (record.run.run_id, record.run.display_name, record.run.run_group, *record.run.tags)
        for file in (folder / "killed" / "wandb").glob("*/run-*.wandb")
        for record in wandb_log.records(file)
        if record.WhichOneof("record_type") == "run"
    ]
    assert set(told) == {(run_id, "mine", "ours", "small", "tried")}
    seen = EventAccumulator(str(folder / "killed" / "tensorboard"), {"scalars": 0}).Reload()
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, steps + 1))
    assert "timeline" in seen.Tags()["tensors"]
    last = rows[-1]
    assert last["timeline_page/_type"] == "html-file"
    media = wandb_log.newest(folder / "killed").parent / "files"
    predicted, measured = panels_in((media / last["timeline_page/path"]).read_text())
    assert predicted["ops"]
    assert measured["ops"]
    (config,) = (
        {update.key: update.value_json for update in record.run.config.update}
        for record in wandb_log.records(wandb_log.newest(folder / "killed"))
        if record.WhichOneof("record_type") == "run"
    )
    assert json.loads(config["steps"]) == steps
    assert_gone(families)


@pytest.mark.slow
def test_online_without_a_key_asks_nobody_and_goes_on_offline(folder: pathlib.Path) -> None:
    """On a terminal, where wandb would ask for one."""
    ours, theirs = os.openpty()
    home = folder / "home-without-a-key"
    home.mkdir()
    hidden = {"WANDB_API_KEY", "NETRC"}
    variables = {key: value for key, value in environment().items() if key not in hidden}
    process = subprocess.Popen(
        [*ALONE, *TINY, "run_dir=no-key", "observe.wandb.mode=online"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**variables, "HOME": str(home), "MPLCONFIGDIR": str(folder / "matplotlib"), "TERM": "xterm"},
    )
    os.close(theirs)
    told = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                piece = terminal.read(4096)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            told += piece
    assert process.wait(timeout=PATIENCE_SECONDS) == 0, told
    assert told.count(b"going on offline") == 1
    assert assert_nothing_lost(folder / "no-key") == 6


@pytest.mark.slow
def test_online_without_a_network_goes_on_offline(folder: pathlib.Path) -> None:
    variables = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    code, stderr = end(start(folder, ALONE, "no-network", "observe.wandb.mode=online", **variables))
    assert code == 0, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("pipetrain: wandb is not reached (")
    assert KEY not in stderr
    assert [file for file in files_of(folder / "no-network") if KEY.encode() in file.read_bytes()] == []
    assert assert_nothing_lost(folder / "no-network") == 6
