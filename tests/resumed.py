"""Runs for tests of resuming: a tiny model with dropout, so that nothing random may be forgotten."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from commands import PIPETRAIN, Process, begin, children_of, end, wait_until
from ranks import PATIENCE_SECONDS
from torch import equal

from pipetrain.models.weights import read_weights

STEPS = 40
RUN = [
    "experiment=smoke",
    "data=text",
    "model.dropout=0.1",
    f"steps={STEPS}",
    "snapshot.every_steps=2",
    "observe.progress=false",
]


def start(folder: pathlib.Path, command: list[str], *options: str) -> Process:
    """Starts a run in `folder`, which holds its text."""
    return begin(folder, [*command, *RUN, "data.path=text", *options])


def finish(folder: pathlib.Path, *options: str) -> str:
    """Runs to the end; returns stderr."""
    code, stderr = end(start(folder, PIPETRAIN, *options))
    assert code == 0, stderr
    return stderr


def metrics_of(run: pathlib.Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def num_steps_of(run: pathlib.Path) -> int:
    """Steps that are in the metrics by now."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def assert_same_training(
    run: pathlib.Path,
    other: pathlib.Path,
    *,
    from_step: int = 1,
    steps: int = STEPS,
    keys: Sequence[str] = ("loss", "grad_norm", "lr"),
) -> None:
    """Equal figures of all steps, equal weights at the end, bit for bit."""
    ours, theirs = metrics_of(run), metrics_of(other)
    assert [line["step"] for line in ours] == list(range(from_step, steps + 1))
    for key in keys:
        assert [line[key] for line in ours] == [line[key] for line in theirs][from_step - 1 :]
    assert_same_weights(run, other)


def assert_same_weights(run: pathlib.Path, other: pathlib.Path) -> None:
    weights, expected = (read_weights(folder / "weights") for folder in (run, other))
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not equal(weights[name], expected[name])] == []


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


def has_reached(process: Process, run: pathlib.Path, step: int) -> bool:
    """Waits until the run is at `step`; False where it was done before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while num_steps_of(run) < step:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"the run did not reach step {step}"
        time.sleep(0.01)
    return True
