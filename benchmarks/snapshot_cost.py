"""What a snapshot costs the training: beside it, against one that training waits for.

    python -m benchmarks.snapshot_cost [--saves=20] [--folder=FOLDER] [--json=FILE]

A model of 200 MB trains with AdamW on one thread, so 600 MB are saved. A save costs the time of `save` and `poll`, and
what the steps that run until it is done take longer than the median of the steps just before. The folder is on the disk that is to
be measured: /tmp may be memory.
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

NUM_LAYERS, WIDTH, ROWS = 12, 2048, 16
STEPS_BETWEEN = 10
CPU = torch.device("cpu")


class Training:
    """A model, its optimizer and its snapshots."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.saver = Saver(folder, rank=0, agree=lambda value: value, keep_last=1, say=print)
        self._inputs = torch.randn(ROWS, WIDTH)
        self._saves = 0

    def step(self) -> None:
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

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


def beside_training(training: Training, step_seconds: float) -> tuple[float, float, int]:
    """What one save costs: seconds of the copy, seconds that the steps after it took longer, and their number."""
    copy, slower, steps = seconds_of(training.save), 0.0, 0
    while not training.saved:
        slower += seconds_of(training.step) - step_seconds + seconds_of(training.saver.poll)
        steps += 1
    return copy, slower, steps


@dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    date: str
    machine: str
    saved_bytes: int
    step_seconds: list[float]  # medians of the steps before each save
    blocking_seconds: list[float]
    copy_seconds: list[float]  # the part of the next that `save` itself takes
    asynchronous_seconds: list[float]
    steps_until_saved: list[int]

    def as_text(self) -> str:
        blocking, copy, beside = map(
            statistics.median, (self.blocking_seconds, self.copy_seconds, self.asynchronous_seconds)
        )
        return (
            f"{len(self.blocking_seconds)} saves of {self.saved_bytes / 1e6:.0f} MB, medians\n"
            f"blocking      {blocking:.3f} s\n"
            f"asynchronous  {beside:.3f} s ({beside / blocking:.1%}), {copy:.3f} s of it the copy to host memory"
        )


def measure(folder: Path, saves: int) -> Result:
    """Blocking and asynchronous saves in turns, after one of each that is not counted."""
    training = Training(folder)
    training.step()
    training.blocking_save()
    beside_training(training, 0.0)
    plain, blocking, copies, beside, steps = [], [], [], [], []
    for _ in range(saves):
        plain.append(statistics.median(seconds_of(training.step) for _ in range(STEPS_BETWEEN)))
        copy, slower, count = beside_training(training, plain[-1])
        blocking.append(seconds_of(training.blocking_save))
        copies.append(copy)
        beside.append(copy + slower)
        steps.append(count)
    return Result(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        saved_bytes=sum(p.numel() * p.element_size() for p in training.model.parameters()) * 3,
        step_seconds=plain,
        blocking_seconds=blocking,
        copy_seconds=copies,
        asynchronous_seconds=beside,
        steps_until_saved=steps,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a snapshot costs the training.")
    parser.add_argument("--saves", type=int, default=20, help="saves of each kind (default: 20)")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to be measured (default: .)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="snapshot-cost-") as folder:
        result = measure(Path(folder), options.saves)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    print(result.as_text())


if __name__ == "__main__":
    main()
