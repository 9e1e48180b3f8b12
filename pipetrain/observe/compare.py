"""Several runs beside each other: what differs in their configurations, what came out, and their losses in one plot."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetrain.config.load import read
from pipetrain.config.phases import leaves
from pipetrain.config.problem import shown
from pipetrain.observe.folder import RunFolder
from pipetrain.observe.lines import read_lines
from pipetrain.observe.report import RunReport, most, read_report
from pipetrain.timeline.draw.page import framed, heading, page, paragraph
from pipetrain.timeline.draw.table import Table, number, size

FORMATS = (".svg", ".png", ".html")
# They say where a run is and how it was watched, not what it did.
_NOT_COMPARED = ("run_dir", "resume", "experiment", "observe.", "snapshot.", "cost.")


@dataclass(frozen=True)
class ComparedRun:
    """One run that has come to its end."""

    name: str  # short, and different from those beside it
    folder: RunFolder
    report: RunReport
    config: Mapping[str, Any]  # by dotted key
    differs: Mapping[str, Any]  # the keys in which the compared runs are not all alike

    def as_json(self) -> dict[str, Any]:
        return {"run": str(self.folder.path), "differs": dict(self.differs), **dataclasses.asdict(self.report)}


def compare(folders: Sequence[RunFolder]) -> tuple[list[ComparedRun], list[str]]:
    """The runs that can be read, and for each of the others a line that says why not."""
    read_runs, problems = [], []
    for folder in folders:
        try:
            read_runs.append(
                (folder, read_report(folder.report), dict(leaves(dataclasses.asdict(read(folder.config)))))
            )
        except (ValueError, OSError) as error:
            problems.append(str(error))
    configs = [config for _, _, config in read_runs]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if not key.startswith(_NOT_COMPARED) and any(config.get(key) != configs[0].get(key) for config in configs)
    ]
    paths = [folder.path for folder, _, _ in read_runs]
    shared = os.path.commonpath([path.parent for path in paths]) if len(paths) > 1 else ""
    names = [os.path.relpath(path, shared) if shared else path.name for path in paths]
    runs = [
        ComparedRun(name, folder, report, config, {key: config.get(key) for key in keys})
        for name, (folder, report, config) in zip(names, read_runs)
    ]
    return runs, problems


def runs_table(runs: Sequence[ComparedRun]) -> Table:
    """A line per run."""
    head = (
        *("run", "experiment", "differs in", "steps", "loss", "held-out", "tokens/s", "step"),
        *("bubble", "exposed R", "peak activations"),
    )
    rows = [
        (
            *(run.name, report.experiment, _words(run.differs) or "-", str(report.steps)),
            *(number(report.loss, "{:.3f}"), number(report.heldout_loss, "{:.3f}")),
            number(report.tokens_per_second, "{:,.0f}"),
            number(report.step_seconds_measured, "{:.4f} s"),
            number(report.bubble_fraction, "{:.1%}"),
            number(sum(value or 0.0 for value in report.recompute_exposed_seconds), "{:.4f} s"),
            size(most(report.peak_activation_bytes)),
        )
        for run, report in ((run, run.report) for run in runs)
    ]
    return Table(head, rows, left=frozenset({0, 1, 2}))


def write_plot(runs: Sequence[ComparedRun], path: Path) -> None:
    """Losses over steps, in the format that the name of `path` asks for.

    Raises:
        ValueError: an unknown format, matplotlib is missing, or a file that cannot be written.
    """
    check_format(path)
    try:
        drawn = _plot(runs, "png" if path.suffix == ".png" else "svg")
    except ImportError as error:
        raise ValueError(f"--out={path}: drawn with matplotlib; pip install 'pipetrain[train]' brings it") from error
    if path.suffix == ".html":
        picture = drawn.decode()
        picture = picture[picture.index("<svg") :]  # without the head of an XML file
        title, caption = "Runs compared", "Loss of each step, in nats per token."
        parts = [heading(title, level=1), paragraph(caption), picture, framed(runs_table(runs))]
        drawn = page(title, *parts).encode()
    try:
        path.write_bytes(drawn)
    except OSError as error:
        raise ValueError(f"--out={path}: cannot be written ({error.strerror})") from error


def _plot(runs: Sequence[ComparedRun], file_format: str) -> bytes:
    """A curve per run; by matplotlib, without pyplot, which would keep the figure and look for a screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axis = figure.subplots()
    for run in runs:
        lines = list(read_lines(run.folder.metrics))
        name = f"{run.name}: {_words(run.differs)}" if run.differs else run.name
        axis.plot([line["step"] for line in lines], [line["loss"] for line in lines], label=name, linewidth=1.2)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    target = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else {}  # the same picture, the same file
    figure.savefig(target, format=file_format, dpi=120, metadata=metadata)
    return target.getvalue()


def check_format(path: Path) -> None:
    """Raises:
    ValueError: nothing can be drawn into a file of this name.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--out={path}: {path.suffix or 'no ending'} is unknown; allowed are {', '.join(FORMATS)}")


def _words(values: Mapping[str, Any]) -> str:
    lists = {key: f"[{','.join(map(str, value))}]" for key, value in values.items() if isinstance(value, (list, tuple))}
    return " ".join(f"{key}={lists.get(key) or shown(value)}" for key, value in values.items())
