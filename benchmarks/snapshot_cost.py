"""What a snapshot costs the training: beside it, against one that training waits for.

    python -m benchmarks.snapshot_cost [--saves=20] [--rows=128] [--folder=FOLDER] [--json=FILE]

A model of 200 MB trains with AdamW on one thread, so 600 MB are saved. A save costs the time of `save` and `poll`, and
what the steps that run until it is done take longer than as many steps without a save: the mean of those just before and
just after, since a machine's speed drifts by more than is to be measured. The folder is on the disk that is to be
measured: /tmp may be memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import RunState, tensors_of

NUM_LAYERS, WIDTH = 12, 2048
STEPS_BETWEEN = 10
CPU = torch.device("cpu")


class Training:
    """A model, its optimizer and its snapshots."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.saver = Saver(folder, rank=0, agree=lambda value: value, keep_last=1, say=print)
        self._inputs = torch.randn(rows, WIDTH)
        self._saves = 0

    def step(self) -> None:
        self.model(self._inputs).square().mean().backward()
        self.saver.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # new memory for gradients makes the time of a step vary

    def save(self) -> None:
        self._saves += 1
        self.saver.save(RunState(self._saves, 1, {}, {}), tensors_of(self.model, self.optimizer, CPU))

    def blocking_save(self) -> None:
        self.save()
        self.saver.wait()

    @property
    def saved(self) -> bool:
        return self.saver.last_step == self._saves


def seconds_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def beside_training(training: Training) -> tuple[float, list[float]]:
    """Seconds of `save`, and of each step until the snapshot is whole."""
    begin, steps = seconds_of(training.save), []
    while not training.saved:
        steps.append(seconds_of(training.step) + seconds_of(training.saver.poll))
    return begin, steps


@dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    date: str
    machine: str
    rows: int
    saved_bytes: int
    step_seconds: list[float]  # means of the steps without a save, before and after each
    blocking_seconds: list[float]
    asynchronous_seconds: list[float]
    begin_seconds: list[float]  # the part of these that `save` itself takes
    steps_until_saved: list[int]

    def as_text(self) -> str:
        blocking, beside = map(statistics.median, (self.blocking_seconds, self.asynchronous_seconds))
        low, _, high = statistics.quantiles(self.asynchronous_seconds)
        return (
            f"{len(self.blocking_seconds)} saves of {self.saved_bytes / 1e6:.0f} MB, medians\n"
            f"blocking      {blocking:.3f} s\n"
            f"asynchronous  {beside:.3f} s ({beside / blocking:.1%}), half of them from {low:.3f} to {high:.3f} s"
        )


def measure(folder: Path, saves: int, rows: int) -> Result:
    """Blocking and asynchronous saves in turns, after one of each that is not counted."""
    training = Training(folder, rows)
    training.step()
    training.blocking_save()
    beside_training(training)

    def without_save() -> list[float]:
        return [seconds_of(training.step) for _ in range(STEPS_BETWEEN)]

    plain, blocking, begins, beside, counts = [], [], [], [], []
    for _ in range(saves):
        before = without_save()
        begin, steps = beside_training(training)
        plain.append(statistics.fmean([*before, *without_save()]))
        begins.append(begin)
        beside.append(begin + sum(steps) - len(steps) * plain[-1])
        counts.append(len(steps))
        blocking.append(seconds_of(training.blocking_save))
    return Result(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        rows=rows,
        saved_bytes=sum(p.numel() * p.element_size() for p in training.model.parameters()) * 3,
        step_seconds=plain,
        blocking_seconds=blocking,
        asynchronous_seconds=beside,
        begin_seconds=begins,
        steps_until_saved=counts,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a snapshot costs the training.")
    parser.add_argument("--saves", type=int, default=20, help="saves of each kind (default: 20)")
    parser.add_argument(
        "--rows", type=int, default=128, help="of a batch; with few, memory is what limits a step (128)"
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to be measured (default: .)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="snapshot-cost-") as folder:
        result = measure(Path(folder), options.saves, options.rows)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    print(result.as_text())


if __name__ == "__main__":
    main()
