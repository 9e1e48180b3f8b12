"""How far the run is, on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipetrain.observe.metrics import StepMetrics
from pipetrain.timeline.draw.table import number

SECONDS_BETWEEN_LINES = 5.0


class Reporter(AbstractContextManager["Reporter"]):
    """What a training loop tells about itself. This one is silent: on every rank but the first, and for `observe.progress=false`."""

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        """A step is over."""

    def say(self, text: str) -> None:
        """A line between steps."""


class Lines(Reporter):
    """For log files: the first step, the last one, and one every few seconds."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._said_at = float("-inf")

    def step(self, metrics: StepMetrics) -> None:
        now = time.monotonic()
        if now - self._said_at >= SECONDS_BETWEEN_LINES or metrics.step == self._num_steps:
            self._said_at = now
            self.say(f"step {metrics.step}/{self._num_steps}  {_figures(metrics)}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar(Reporter):
    """For a terminal."""

    def __init__(self, num_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=num_steps)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, metrics: StepMetrics) -> None:
        self._progress.update(self._task, completed=metrics.step, description=_figures(metrics))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


def make_reporter(num_steps: int, *, shown: bool) -> Reporter:
    """The reporter that suits stderr."""
    if not shown:
        return Reporter()
    return Bar(num_steps) if sys.stderr.isatty() else Lines(num_steps)


def _figures(metrics: StepMetrics) -> str:
    loss = number(metrics.loss, "{:.3f}")
    bubble = "" if metrics.bubble_fraction is None else f"  bubble {metrics.bubble_fraction:.0%}"
    return f"loss {loss}  {metrics.tokens_per_second:,.0f} tokens/s{bubble}"
