"""timeline.json: the steps that the page of a run shows, written as the run goes on, and the page made of it.

Rank 0 records the first steps, then one every few seconds, and the last. When that grows too large for a page, every second one goes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipetrain.config.terminal import say
from pipetrain.config.write_files import replace_file
from pipetrain.monitor.draw.page import Panel, Section, charts_of, panel_of, run_page, run_sections, slowest_of
from pipetrain.monitor.folder import FORMAT_VERSION, read_current
from pipetrain.monitor.lines import spread_lines
from pipetrain.monitor.report import RunReport, measured_and_predicted
from pipetrain.monitor.shown import Shown
from pipetrain.monitor.step_report import Report
from pipetrain.plan.plan import Plan

_FIRST_STEPS = 3
_SECONDS_BETWEEN = 5.0
_MOST_OPS = 40_000  # on a page, messages included: 16 ranks x 64 microbatches have 7,000 in a step
_MOST_SHARE = 0.01  # of the time of a run may go into recording
_MOST_LINES = 1_000  # of metrics.jsonl in the charts


class RecordedSteps:
    """The steps of the phase that goes on; `path` is timeline.json."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head: dict[str, Any] = {"format_version": FORMAT_VERSION, "title": "", "stages": []}
        self._steps: list[dict[str, Any]] = []
        self._due = float("-inf")
        self._failed = False

    def start(self, title: str, stages: Sequence[str]) -> None:
        """`title` stands at the page's head, `stages` says which layers each has."""
        self._head |= {"title": title, "stages": list(stages)}

    def add(self, step: int, report: Report) -> None:
        """Step number `step` is over; it is recorded if it is time to, and small enough. A full disk costs the page, not the run."""
        started = time.monotonic()
        if len(self._steps) >= _FIRST_STEPS and started < self._due:
            return
        if sum(len(timeline.events) for timeline in report.timelines) > _MOST_OPS:
            return
        measured, _ = measured_and_predicted(report.schedule, report, [])
        self._keep(step, measured, report)
        try:
            self._write(self._path, [], [])
        except OSError as error:
            if not self._failed:
                self._failed = True
                say(f"{self._path} lacks steps from here on ({error.strerror})")
        spent = time.monotonic() - started
        self._due = time.monotonic() + max(_SECONDS_BETWEEN, spent / _MOST_SHARE)

    def rewind(self, first_step: int) -> None:
        """Steps from `first_step` on will come again."""
        self._steps = [one for one in self._steps if one["step"] < first_step]

    def finish(
        self,
        path: Path,
        report: RunReport,
        last: Report,
        measured: Sequence[Shown],
        predicted: Shown | None,
        predicted_from: range,
    ) -> None:
        """Writes the last step too, what was predicted from the steps `predicted_from`, and what stands below the drawing."""
        names, shown, fixed = self._keep(report.steps, measured, last), [*measured], []
        if predicted is not None:
            first, stop = predicted_from.start, predicted_from.stop - 1
            names, shown = [f"Predicted from the op times of steps {first} to {stop}", *names], [predicted, *shown]
            fixed = [panel_of(predicted, names[0], limit=last.per_rank("limit_bytes"))]
        clocks = max(last.per_rank("clock_error_seconds"))
        self._write(path, fixed, run_sections(report, shown, names, clocks))

    def _keep(self, step: int, measured: Sequence[Shown], report: Report) -> list[str]:
        """Adds the step; returns the names of its panels, one per replica."""
        slowest, panels = slowest_of(measured), []
        for replica, one in enumerate(measured):
            own = [report.of_ranks[where.rank] for where in report.ranks_of(replica)]
            last_of = ", the last to end" if replica == slowest else ""
            name = f"Measured, step {step}" + (f", replica {replica}{last_of}" if len(measured) > 1 else "")
            peak, limit = [rank.peak_activation_bytes for rank in own], [rank.limit_bytes for rank in own]
            panels.append(panel_of(one, name, peak=peak, limit=limit))
        names = [panel["name"] for panel in panels]
        panels.append(panels.pop(slowest))  # the last panel is the one that the page opens with
        if sum(len(panel["ops"]) for panel in panels) > _MOST_OPS:
            del panels[:-1]
        if self._steps and self._steps[-1]["step"] == step:
            self._steps.pop()
        self._steps.append({"step": step, "panels": panels})
        while len(self._steps) > 2 and sum(map(_num_ops, self._steps)) > _MOST_OPS:
            self._steps = [*self._steps[:-1:2], self._steps[-1]]
        return names

    def _write(self, path: Path, fixed: Sequence[Panel], sections: Sequence[Section]) -> None:
        values = {**self._head, "fixed": fixed, "steps": self._steps, "sections": list(map(asdict, sections))}
        # Who reads it meanwhile has the old one or the new one. The columns of a table may be a set.
        replace_file(path, json.dumps(values, separators=(",", ":"), default=sorted))


def layers_of_stages(plan: Plan, kinds: Sequence[str]) -> list[str]:
    """For each stage its layers, as in `0 to 2 (embedding, 2 x block)`."""
    said = []
    for numbers in map(plan.layers_of, range(plan.num_stages)):
        runs = [(kind, len(list(same))) for kind, same in itertools.groupby(kinds[numbers.start : numbers.stop])]
        words = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in runs)
        span = f"{numbers.start} to {numbers.stop - 1}" if len(numbers) > 1 else f"{numbers.start}"
        said.append(f"{span} ({words})" if words else span)
    return said


def _num_ops(step: Mapping[str, Any]) -> int:
    return sum(len(panel["ops"]) for panel in step["panels"])


def page_of_run(recorded: Path, metrics: Path, *, above: Sequence[Section] = (), live: bool = False) -> str:
    """The page of a run as its folder has it now.

    Raises:
        ValueError: timeline.json cannot be read.
    """
    missing = "there is no such file; the run has recorded no step yet, or an older version wrote it"
    values = read_current(recorded, missing, "report.json and metrics.jsonl may still be whole")
    try:
        return run_page(values, charts_of(spread_lines(metrics, _MOST_LINES)), above=above, live=live)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{recorded}: this is not a file of recorded steps ({type(error).__name__}: {error})"
        ) from error
