"""Everything that a run writes and shows while it goes on: each rank its events, rank 0 all the rest."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipetrain.config.records import ObserveConfig
from pipetrain.config.terminal import printable, say
from pipetrain.config.write_files import replace_file
from pipetrain.monitor.draw.page import slowest_of
from pipetrain.monitor.draw.table import number
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import EventFile
from pipetrain.monitor.measured_costs import measure_costs
from pipetrain.monitor.recorded import RecordedSteps, layers_of_stages, page_of_run
from pipetrain.monitor.report import RunReport, as_markdown, read_report, with_bytes, write_report
from pipetrain.monitor.shown import Shown, title_of
from pipetrain.monitor.step_report import Report, StepMetrics
from pipetrain.monitor.trackers import Ending, Trackers, make_trackers
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import Profile
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.schedule import Schedule

SECONDS_BETWEEN_LINES = 5.0
_PROFILED_STEPS = 9  # of the newest: profile.json has medians of their op times, as a single step may be like no other


class Recorder:
    """Writes into a folder that exists, from `first_step` on. `metrics` and the `timelines` (of each replica) of the steps in `keep` are what rank 0 remembers."""

    def __init__(
        self, folder: RunFolder, rank: int, config: ObserveConfig, *, num_steps: int, keep: range, first_step: int = 1
    ) -> None:
        self.metrics: list[StepMetrics] = []
        self.timelines: list[Sequence[Timeline]] = []
        self.last_step: int | None = None  # that has ended, on every rank
        self._newest: deque[Sequence[Timeline]] = deque(maxlen=_PROFILED_STEPS)
        self._folder = folder
        self._keep = keep
        self._events = EventFile(folder.events(rank), rank, num_steps, first_step)
        self.on_event = self._events  # the sink for this rank's events
        self.is_first = rank == 0
        self._reporter = _Reporter(num_steps, shown=config.progress and self.is_first)
        self._recorded = RecordedSteps(folder.recorded)
        self._trackers = Trackers(make_trackers(config, folder, first_step) if self.is_first else {})

    def start(
        self, config_text: str, config: Mapping[str, Any], *phases: tuple[Plan, Schedule], kinds: Sequence[str] = ()
    ) -> None:
        """What was to be done, before it is done: the configuration as the text of its file, and as plain values; plan and schedule of the run,
        or of each of its phases. In the folder itself are those of the first. `kinds`: of the layers, where they are known."""
        if not self.is_first:
            return
        replace_file(self._folder.config, config_text)
        folders = map(self._folder.phase, range(len(phases))) if len(phases) > 1 else ()
        for folder, (plan, schedule) in zip((self._folder, *folders), (phases[0], *phases)):
            folder.path.mkdir(parents=True, exist_ok=True)
            replace_file(folder.plan, json.dumps(asdict(plan), indent=2) + "\n")
            replace_file(folder.schedule, write_csv(schedule))
        self._recorded.start(f"{config['experiment']}: {title_of(phases[0][1])}", layers_of_stages(phases[0][0], kinds))
        values = {**config, "plan": asdict(phases[0][0])}
        self._trackers.tell(lambda tracker: tracker.start(values))

    def begin_phase(self, number: int | None, step: int, keep: range) -> None:
        """From `step` on it is another phase: of the timelines, those of the steps in `keep` are remembered."""
        self._reporter.say(f"step {step}: phase {number} begins")
        self._keep = keep
        self.timelines = []
        self._newest.clear()
        self._recorded.rewind(0)

    def end_step(self, step: int, metrics: StepMetrics | None = None, ops: Report | None = None) -> None:
        """Step number `step` is over; rank 0 has its figures, and what ran when."""
        self._events.end_step(step)
        self.last_step = step
        if metrics is None:
            return
        self._trackers.tell(lambda tracker: tracker.step(metrics))
        self._reporter.step(metrics)
        self.metrics.append(metrics)
        if ops is None:
            return
        self._newest.append(ops.timelines)
        if step in self._keep:
            self.timelines.append(ops.timelines)
        self._recorded.add(step, ops)

    def rewind(self, first_step: int) -> None:
        """Training rolled back to an older snapshot: steps from `first_step` on will be recorded again."""
        self._events.rewind(first_step)
        self._trackers.tell(lambda tracker: tracker.rewind(first_step))
        self._recorded.rewind(first_step)
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
        self, report: RunReport, measured: Sequence[Shown], predicted: Shown | None, last: Report | None
    ) -> None:
        """Writes the report, and the steps predicted and measured `last`, of each replica. Without `last` no timeline.html and
        no profile.json. The report of a phase goes into the phase's folder, and to no tracker."""
        folder = self._folder if report.phase is None else self._folder.phase(report.phase)
        write_report(folder.report, report)
        replace_file(folder.report_text, as_markdown(report))
        if last is None:
            return
        costs = with_bytes(measure_costs(last.schedule.num_stages, self._newest or [last.timelines]), last)
        replace_file(folder.profile, Profile(costs, last.schedule.num_microbatches).as_json())
        self._recorded.finish(folder.recorded, report, last, measured, predicted, self._keep)
        drawn = page_of_run(folder.recorded, self._folder.metrics)
        replace_file(folder.timeline, drawn)
        if report.phase is None:
            pictures = [*([] if predicted is None else [predicted]), measured[slowest_of(measured)]]
            ending = Ending(report, pictures, drawn)
            self._trackers.tell(lambda tracker: tracker.finish(ending))

    def report_of_phase(self, number: int) -> RunReport | None:
        """What a phase that is over has reported, perhaps before this process went on from a snapshot; None: nothing that can be read."""
        try:
            return read_report(self._folder.phase(number).report)
        except ValueError:
            return None

    def close(self) -> None:
        with closing(self._events), closing(self._reporter), closing(self._trackers):
            pass


class _Reporter:
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

    def close(self) -> None:
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
            print(printable(text), file=sys.stderr, flush=True)


def _figures(metrics: StepMetrics) -> str:
    loss = number(metrics.loss, "{:.3f}")
    bubble = "" if metrics.bubble_fraction is None else f"  bubble {metrics.bubble_fraction:.0%}"
    return f"loss {loss}  {metrics.tokens_per_second:,.0f} tokens/s{bubble}"
