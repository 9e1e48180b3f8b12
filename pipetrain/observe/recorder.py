"""Everything that a run writes while it goes on: each rank its events, rank 0 all the rest."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict

from pipetrain.config.records import RunConfig
from pipetrain.observe.explain import explanation
from pipetrain.observe.folder import RunFolder
from pipetrain.observe.metrics import MetricsFile, StepMetrics
from pipetrain.observe.page import page
from pipetrain.observe.progress import make_reporter
from pipetrain.observe.report import RunReport, as_markdown, write_report
from pipetrain.observe.trace import EventFile
from pipetrain.plan.plan import Plan
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.render.svg import svg
from pipetrain.schedule.show import Shown


class Recorder:
    """Writes into a folder that exists, from `first_step` on. `metrics` and the `timelines` of the steps in `keep` are what rank 0 remembers."""

    def __init__(self, folder: RunFolder, rank: int, config: RunConfig, keep: range, first_step: int = 1) -> None:
        self.metrics: list[StepMetrics] = []
        self.timelines: list[Timeline] = []
        self._folder = folder
        self._keep = keep
        self._stack = ExitStack()
        self._events = self._stack.enter_context(closing(EventFile(folder.events(rank), config.steps, first_step)))
        self.is_first = rank == 0
        self._reporter = self._stack.enter_context(
            make_reporter(config.steps, shown=config.observe.progress and self.is_first)
        )
        self._metrics_file = (
            self._stack.enter_context(closing(MetricsFile(folder.metrics, first_step))) if self.is_first else None
        )

    def start(self, config_text: str, plan: Plan) -> None:
        """What was to be done, before it is done."""
        if self.is_first:
            self._folder.config.write_text(config_text)
            self._folder.plan.write_text(json.dumps(asdict(plan), indent=2) + "\n")

    def on_event(self, event: OpEvent) -> None:
        """The sink for this rank's events."""
        self._events(event)

    def end_step(self, step: int, metrics: StepMetrics | None = None, timeline: Timeline | None = None) -> None:
        """Step number `step` is over; rank 0 has its figures."""
        self._events.end_step(step)
        if metrics is None or timeline is None or self._metrics_file is None:
            return
        self._metrics_file.write(metrics)
        self._reporter.step(metrics)
        self.metrics.append(metrics)
        if step in self._keep:
            self.timelines.append(timeline)

    def rewind(self, first_step: int) -> None:
        """Training goes on from an older snapshot: steps from `first_step` on will be told again."""
        self._events.rewind(first_step)
        if self._metrics_file is not None:
            self._metrics_file.rewind(first_step)
        self.metrics = [metrics for metrics in self.metrics if metrics.step < first_step]

    def say(self, text: str) -> None:
        """Something that the user should know now; on rank 0."""
        if self.is_first:
            print(f"pipetrain: {text}", file=sys.stderr, flush=True)

    def evaluated(self, step: int, heldout_loss: float | None) -> None:
        """A held-out evaluation on the way."""
        if heldout_loss is not None:
            self._reporter.say(f"step {step}: held-out loss {heldout_loss:.3f} nats per token")

    def finish(self, report: RunReport, measured: Shown, predicted: Shown | None, clock_error_seconds: float) -> None:
        """What was predicted, and what was done."""
        text = as_markdown(report)
        write_report(self._folder.report, report)
        self._folder.report_text.write_text(text)
        first, last = self._keep.start, self._keep.stop - 1
        captions = [f"Predicted from the op times of steps {first} to {last}."] if predicted is not None else []
        captions.append(f"Measured: step {report.steps}, the last.")
        captions = [f"{place} {caption}" for place, caption in zip(("Above:", "Below:"), captions)]
        pictures = [measured] if predicted is None else [predicted, measured]
        below = text + "\n" + explanation(measured, predicted, clock_error_seconds)
        self._folder.timeline.write_text(page(report.experiment, captions, svg(*pictures), below))

    def close(self) -> None:
        self._stack.close()
