"""What events and metrics cost of the steps of a run: `torchrun --nproc-per-node=2 -m benchmarks.report_cost steps=60 observe.progress=false`.

Takes the keys of a run. Each rank says how long its main thread computed for them, after the first steps, which all report.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipetrain.monitor.lines import EventFile
from pipetrain.train import main as train
from pipetrain.trainer.steps import FIRST_STEPS, Reports


class Cost:
    """Seconds of this thread in the functions that it watches, and of all steps, those after the first ones."""

    def __init__(self) -> None:
        self.seconds, self.steps, self.every = 0.0, list[float](), None

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = time.thread_time()
        yield
        self.seconds += time.thread_time() - before

    def watch(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            with self.counting():
                return write(*arguments)

        return watched

    def end_step(self, end: Callable[..., Any]) -> Callable[..., Any]:
        def ended(reports: Any, seconds: float) -> None:
            self.steps.append(seconds)
            end(reports, seconds)
            self.every = reports.every
            if len(self.steps) == FIRST_STEPS:
                self.seconds = 0.0

        return ended


def main(arguments: list[str]) -> int:
    cost, working = Cost(), Reports.working

    @contextmanager
    def counted(reports: Any) -> Iterator[None]:
        with cost.counting(), working(reports):
            yield

    Reports.working = counted  # type: ignore[method-assign]
    Reports.end_step = cost.end_step(Reports.end_step)  # type: ignore[method-assign]
    EventFile.__call__ = cost.watch(EventFile.__call__)  # type: ignore[method-assign]
    code = train(arguments)
    steps = cost.steps[FIRST_STEPS:]
    if steps:
        print(
            f"rank {os.environ.get('RANK', 0)}: {cost.seconds * 1e3:.1f} ms in {len(steps)} steps of {sum(steps) / len(steps):.3f} s "
            f"({cost.seconds / sum(steps):.2%}); every {cost.every} steps report",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
