"""Runs that end before their time and go on: the result is that of the run that nobody disturbed, bit for bit."""

import json
import os
import pathlib
import random
import signal

import pytest
from commands import PIPETRAIN, children_of, end, torchrun, wait_until
from resumed import STEPS, assert_same_training, finish, kill_at_random, num_steps_of, start
from small_text import make_text

from pipetrain.snapshot.files import steps_in
from pipetrain.snapshot.manifest import check_whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where `text` is, and `whole`, the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs")
    make_text(folder / "text")
    finish(folder, "run_dir=whole", "snapshot.every_steps=null")
    assert not (folder / "whole" / "snapshots").exists()
    return folder


@pytest.mark.slow
def test_usr1_saves_and_the_run_goes_on_over_three_stages(folder: pathlib.Path) -> None:
    process = start(folder, PIPETRAIN, "run_dir=asked", "snapshot.every_steps=null")
    wait_until(lambda: num_steps_of(folder / "asked") >= 3, process)
    process.send_signal(signal.SIGUSR1)
    code, stderr = end(process)
    assert code == 75, stderr
    (step,) = steps_in(folder / "asked" / "snapshots")
    assert step == num_steps_of(folder / "asked") < STEPS
    snapshot = folder / "asked" / "snapshots" / f"step-{step:08d}"
    assert stderr.splitlines()[-1] == (
        f"pipetrain: stopped by SIGUSR1; the report is written, and resume={snapshot} goes on"
    )
    assert json.loads((snapshot / "state.json").read_text())["plan"]["balance"] == [2, 2]
    told = finish(
        folder, f"resume={snapshot}", "run_dir=gone-on", "pipeline=1f1b", "recompute=inline", "pipeline.num_stages=3"
    )
    assert f"pipetrain: going on from {snapshot}" in told
    assert_same_training(folder / "gone-on", folder / "whole", from_step=step + 1)
    assert json.loads((folder / "gone-on" / "report.json").read_text())["steps"] == STEPS


def with_restarts(folder: pathlib.Path, name: str, num_kills: int, num_ranks: int, *more: str) -> str:
    """A run under torchrun of which a rank is killed again and again."""
    launcher = [*torchrun(), f"--nproc-per-node={num_ranks}", f"--max-restarts={num_kills}", "--monitor-interval=0.1"]
    options = [f"run_dir={name}", "resume=auto", f"pipeline.num_stages={num_ranks}", *more]
    process = start(folder, [*launcher, "-m", "pipetrain.train"], *options)
    kills = kill_at_random(process, folder / name, num_kills, random.Random(num_kills))
    ranks = children_of(process.pid)
    code, stderr = end(process)
    assert code == 0, stderr
    assert kills == num_kills
    assert [pid for pid in ranks if os.path.exists(f"/proc/{pid}")] == []
    return stderr


@pytest.mark.slow
def test_random_kills_change_nothing(folder: pathlib.Path) -> None:
    """Of four ranks; `make soak` tries hundreds."""
    stderr = with_restarts(folder, "killed", 4, 4)
    assert "going on from" in stderr
    assert "damaged" not in stderr
    assert_same_training(folder / "killed", folder / "whole")
    snapshots = folder / "killed" / "snapshots"
    assert [check_whole(snapshots / f"step-{step:08d}").step for step in steps_in(snapshots)] == [STEPS, STEPS - 2]
    assert len(list(snapshots.iterdir())) == 2


@pytest.mark.slow
def test_bfloat16_weights_and_their_masters_survive_kills_and_other_stages(folder: pathlib.Path) -> None:
    """The masters hold what the weights have lost: a run that goes on from the weights alone has other losses."""
    finish(folder, "precision=bf16-true", "run_dir=masters-whole", "snapshot.every_steps=null")
    options = ["precision=bf16-true", "snapshot.keep_last=99"]
    with_restarts(folder, "masters", 2, 2, *options)
    assert_same_training(folder / "masters", folder / "masters-whole")
    middle = folder / "masters" / "snapshots" / "step-00000020"
    finish(folder, *options, f"resume={middle}", "run_dir=masters-three", "pipeline.num_stages=3")
    assert_same_training(folder / "masters-three", folder / "masters-whole", from_step=21)
    seen = [
        json.loads((folder / name / "report.json").read_text())["tokens_seen"]
        for name in ("masters-whole", "masters-three")
    ]
    assert seen == [STEPS * 8 * 32] * 2


@pytest.mark.slow
def test_a_damaged_snapshot_is_told_and_the_one_before_used(folder: pathlib.Path) -> None:
    process = start(folder, PIPETRAIN, "run_dir=damaged", "snapshot.keep_last=3")
    wait_until(lambda: len(steps_in(folder / "damaged" / "snapshots")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 75
    newest, before, *_ = steps_in(folder / "damaged" / "snapshots")
    broken = folder / "damaged" / "snapshots" / f"step-{newest:08d}" / "weights" / "rank-0001.safetensors"
    os.truncate(broken, 1000)
    told = finish(folder, "run_dir=damaged", "resume=auto")
    assert f"pipetrain: {broken} has 1000 bytes" in told
    assert f"going on from step-{before:08d}" in told
    assert_same_training(folder / "damaged", folder / "whole")
