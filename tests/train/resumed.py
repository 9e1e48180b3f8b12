"""Runs for tests of resuming: a tiny model with dropout, so that nothing random may be forgotten."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from safetensors.torch import load_file
from torch import equal

Process = subprocess.Popen  # of text
STEPS = 40
RUN = [
    "experiment=smoke",
    "data=text",
    "model.dropout=0.1",
    f"steps={STEPS}",
    "snapshot.every_steps=2",
    "observe.progress=false",
]
PIPETRAIN = [sys.executable, "-m", "pipetrain.cli", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def make_text(folder: pathlib.Path) -> None:
    folder.mkdir()
    words = [
        "the",
        "pipeline",
        "runs",
        "while",
        "the",
        "stage",
        "waits",
        "and",
        "the",
        "stage",
        "waits",
        "while",
        "the",
        "pipeline",
        "runs",
    ]
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(words[(number + at) % len(words)] for at in range(2000)))


def environment() -> dict[str, str]:
    """The package from this checkout; nothing of a launcher that runs the tests."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def start(folder: pathlib.Path, command: list[str], *options: str) -> Process:
    """Starts a run in `folder`, which holds its text."""
    return subprocess.Popen(
        [*command, *RUN, "data.path=text", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
        start_new_session=True,
    )


def end(process: Process, seconds: float = 100.0) -> tuple[int, str]:
    """Exit code and stderr; nothing of the run is left behind."""
    try:
        _, stderr = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            for child in children_of(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
    return process.returncode, stderr


def finish(folder: pathlib.Path, *options: str) -> str:
    """Runs to the end; returns stderr."""
    code, stderr = end(start(folder, PIPETRAIN, *options))
    assert code == 0, stderr
    return stderr


def metrics_of(run: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def num_steps_of(run: pathlib.Path) -> int:
    """Steps that are in the metrics by now."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def assert_same_training(run: pathlib.Path, other: pathlib.Path, *, from_step: int = 1) -> None:
    """Equal losses and norms of all steps, equal weights at the end, bit for bit."""
    ours, theirs = metrics_of(run), metrics_of(other)
    assert [line["step"] for line in ours] == list(range(from_step, STEPS + 1))
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in ours] == [line[key] for line in theirs][from_step - 1 :]
    weights, expected = (load_file(folder / "weights" / "model.safetensors") for folder in (run, other))
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not equal(weights[name], expected[name])] == []


def wait_until(ready: Callable[[], bool], process: Process, seconds: float = 60.0) -> None:
    """Looks again and again, as long as the process runs."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not get that far in time"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started: under torchrun, the ranks."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def kill_at_random(process: Process, run: pathlib.Path, num_kills: int, chance: random.Random) -> int:
    """Kills a random rank at a random moment, each time some steps after the restart before.

    The kills are spread over the run, so that it is not done before the last one. Returns how many there were.
    """
    for kills in range(num_kills):
        latest = STEPS * (kills + 1) // (num_kills + 1)
        if not has_reached(process, run, min(num_steps_of(run) + chance.randint(1, 6), latest)):
            return kills
        time.sleep(chance.uniform(0.0, 0.08))  # any moment of a step or a save
        ranks = children_of(process.pid)
        if not ranks:
            return kills
        os.kill(chance.choice(ranks), signal.SIGKILL)
        wait_until(lambda ranks=ranks: not set(ranks) & set(children_of(process.pid)), process)
    return num_kills


def has_reached(process: Process, run: pathlib.Path, step: int, seconds: float = 60.0) -> bool:
    """Waits until the run is at `step`; False where it was done before."""
    deadline = time.monotonic() + seconds
    while num_steps_of(run) < step:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"the run did not reach step {step}"
        time.sleep(0.01)
    return True
