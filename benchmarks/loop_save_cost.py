"""How long the steps of a loop of one's own wait for `pipetrain.save`: `torchrun --nproc-per-node=2 -m benchmarks.loop_save_cost`.

Each rank says how long it was in `save`, in the wait before an optimizer step and in the agreements between steps. The copies and the
writing go on beside the steps, which also slows these: `benchmarks.snapshot_cost` measures that.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

import pipetrain
from pipetrain.snapshot.saver import Saver

NUM_LAYERS, WIDTH, ROWS = 12, 1024, 256


class Waits:
    """Adds up the seconds in the functions that it watches; of one that calls another, those of the outer one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            start, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - start

        return watched


def measure(folder: str, num_saves: int, every: int) -> str:
    """One line of this rank."""
    waits = Waits()
    Saver.before_update, Saver.poll = waits.watch(Saver.before_update), waits.watch(Saver.poll)  # type: ignore[method-assign]
    save = waits.watch(pipetrain.save)
    layers = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())] * NUM_LAYERS
    rows = torch.randn(ROWS, WIDTH)
    with pipetrain.Pipeline(layers, nn.functional.mse_loss) as pipeline:
        shared = pipeline.ranks.from_first(folder)
        optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
        steps: list[float] = []
        for number in range(every * (num_saves + 1)):
            if number == every:  # the first ones, and their save, are not counted
                waits.seconds, begun = 0.0, time.perf_counter()
            start = time.perf_counter()
            pipeline.step(rows, rows)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - start)
            if (number + 1) % every == 0:
                save(shared, pipeline, optimizer, keep_last=2)
        total = time.perf_counter() - begun
        saved = sum(one.nbytes for own in optimizer.state.values() for one in own.values()) * 3 / 2
        return (
            f"rank {pipeline.rank}: {num_saves} saves of {saved / 1e6:.0f} MB, one every {every} steps of {statistics.median(steps):.3f} s: "
            f"waits {waits.seconds:.3f} s of {total:.1f} s ({waits.seconds / total:.2%})"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How long steps wait for saves.")
    parser.add_argument("--saves", type=int, default=5, help="saves (default: 5)")
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next (default: 20)")
    parser.add_argument("--folder", default=".", help="on the disk to be measured (default: .)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="loop-save-cost-") as folder:
        print(measure(folder, options.saves, options.every), flush=True)


if __name__ == "__main__":
    main()
