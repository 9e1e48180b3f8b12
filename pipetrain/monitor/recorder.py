"""Everything that a run writes and shows while it goes on: each rank its events, rank 0 all the rest."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipetrain.config.records import ObserveConfig
from pipetrain.config.terminal import say
from pipetrain.monitor.draw.page import run_page, slowest_of
from pipetrain.monitor.draw.table import number
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import EventFile
from pipetrain.monitor.report import RunReport, as_markdown, read_report, write_report
from pipetrain.monitor.shown import Shown
from pipetrain.monitor.step_report import StepMetrics
from pipetrain.monitor.trackers import Ending, Trackers, make_trackers
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import Profile
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.schedule import Schedule

SECONDS_BETWEEN_LINES = 5.0


class Recorder:
    """Writes into a folder that exists, from `first_step` on. `metrics` and the `timelines` (of each replica) of the steps in `keep` are what rank 0 remembers."""

    def __init__(
        self, folder: RunFolder, rank: int, config: ObserveConfig, *, num_steps: int, keep: range, first_step: int = 1
    ) -> None:
        self.metrics: list[StepMetrics] = []
        self.timelines: list[Sequence[Timeline]] = []
        self.last_step: int | None = None  # that has ended, on every rank
        self._folder = folder
        self._keep = keep
        self._stack = ExitStack()
        self._events = self._stack.enter_context(closing(EventFile(folder.events(rank), rank, num_steps, first_step)))
        self.on_event = self._events  # the sink for this rank's events
        self.is_first = rank == 0
        self._reporter = self._stack.enter_context(Reporter(num_steps, shown=config.progress and self.is_first))
        trackers = make_trackers(config, folder, first_step) if self.is_first else {}
        self._trackers = self._stack.enter_context(closing(Trackers(trackers)))

    def start(self, config_text: str, config: Mapping[str, Any], *phases: tuple[Plan, Schedule]) -> None:
        """What was to be done, before it is done: the configuration as the text of its file, and as plain values; plan and schedule of the run,
        or of each of its phases. In the folder itself are those of the first."""
        if not self.is_first:
            return
        self._folder.config.write_text(config_text)
        folders = map(self._folder.phase, range(len(phases))) if len(phases) > 1 else ()
        for folder, (plan, schedule) in zip((self._folder, *folders), (phases[0], *phases)):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.plan.write_text(json.dumps(asdict(plan), indent=2) + "\n")
            folder.schedule.write_text(write_csv(schedule))
        values = {**config, "plan": asdict(phases[0][0])}
        self._trackers.tell(lambda tracker: tracker.start(values))

    def begin_phase(self, number: int | None, step: int, keep: range) -> None:
        """From `step` on it is another phase: of the timelines, those of the steps in `keep` are remembered."""
        self._reporter.say(f"step {step}: phase {number} begins")
        self._keep = keep
        self.timelines = []

    def end_step(self, step: int, metrics: StepMetrics | None = None, timelines: Sequence[Timeline] = ()) -> None:
        """Step number `step` is over; rank 0 has its figures, and of each replica what ran when."""
        self._events.end_step(step)
        self.last_step = step
        if metrics is None:
            return
        self._trackers.tell(lambda tracker: tracker.step(metrics))
        self._reporter.step(metrics)
        self.metrics.append(metrics)
        if timelines and step in self._keep:
            self.timelines.append(timelines)

    def rewind(self, first_step: int) -> None:
        """Training rolled back to an older snapshot: steps from `first_step` on will be recorded again."""
        self._events.rewind(first_step)
        self._trackers.tell(lambda tracker: tracker.rewind(first_step))
        self.metrics = [metrics for metrics in self.metrics if metrics.step < first_step]

    def say(self, text: str) -> None:
        """Something that the user should know now; on rank 0."""
        if self.is_first:
            say(text)

    def evaluated(self, step: int, heldout_loss: float | None) -> None:
        """A held-out evaluation on the way."""
        if heldout_loss is not None:
            self._trackers.tell(lambda tracker: tracker.evaluated(step, heldout_loss))
            self._reporter.say(f"step {step}: held-out loss {heldout_loss:.3f} nats per token")

    def finish(
        self,
        report: RunReport,
        measured: Sequence[Shown],
        predicted: Shown | None,
        clock_error_seconds: float | None,
    ) -> None:
        """Write the predicted step and the measured one of each replica. Without `measured` it writes no timeline.html and no profile.json.
        The report of a phase goes into the phase's folder, and to no tracker."""
        folder = self._folder if report.phase is None else self._folder.phase(report.phase)
        write_report(folder.report, report)
        folder.report_text.write_text(as_markdown(report))
        if not measured or clock_error_seconds is None:
            return
        profile = Profile(measured[0].costs, measured[0].schedule.num_microbatches)
        folder.profile.write_text(profile.as_json())
        drawn = run_page(
            report, measured, predicted, predicted_from=self._keep, clock_error_seconds=clock_error_seconds
        )
        folder.timeline.write_text(drawn)
        slowest = measured[slowest_of(measured)]
        pictures = [slowest] if predicted is None else [predicted, slowest]
        if report.phase is None:
            ending = Ending(report, pictures, drawn)
            self._trackers.tell(lambda tracker: tracker.finish(ending))

    def report_of_phase(self, number: int) -> RunReport | None:
        """What a phase that is over has reported, perhaps before this process went on from a snapshot; None: nothing that can be read."""
        try:
            return read_report(self._folder.phase(number).report)
        except ValueError:
            return None

    def close(self) -> None:
        self._stack.close()


class Reporter(AbstractContextManager["Reporter"]):
    """How far the run is, on stderr: a bar on a terminal, elsewhere a line for the first step, the last one, and one every few seconds.
    Nothing on a rank that is not to show it."""

    def __init__(self, num_steps: int, *, shown: bool) -> None:
        self._num_steps = num_steps
        self._shown = shown
        self._said_at = float("-inf")
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(TextColumn("step"), *columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=num_steps)
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, metrics: StepMetrics) -> None:
        """A step is over."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, description=_figures(metrics))
        elif now - self._said_at >= SECONDS_BETWEEN_LINES or metrics.step == self._num_steps:
            self._said_at = now
            self.say(f"step {metrics.step}/{self._num_steps}  {_figures(metrics)}")

    def say(self, text: str) -> None:
        """A line between steps."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)


def _figures(metrics: StepMetrics) -> str:
    loss = number(metrics.loss, "{:.3f}")
    bubble = "" if metrics.bubble_fraction is None else f"  bubble {metrics.bubble_fraction:.0%}"
    return f"loss {loss}  {metrics.tokens_per_second:,.0f} tokens/s{bubble}"
