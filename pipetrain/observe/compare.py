"""Several runs beside each other: what differs in their configurations, what came out, and their losses in one plot."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetrain.config.load import read
from pipetrain.observe.folder import RunFolder
from pipetrain.observe.picture import Curve, loss_plot
from pipetrain.observe.report import RunReport, read_report
from pipetrain.observe.trackers.jsonl import read_lines
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

    @property
    def exposed_seconds(self) -> float:
        """Recomputation of a step for which an op had to wait, of all ranks."""
        return sum(value or 0.0 for value in self.report.recompute_exposed_seconds)

    @property
    def peak_activation_bytes(self) -> float | None:
        """Of the rank that holds most."""
        return max((value for value in self.report.peak_activation_bytes if value is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        return {"run": str(self.folder.path), "differs": dict(self.differs), **dataclasses.asdict(self.report)}


def compare(folders: Sequence[RunFolder]) -> tuple[list[ComparedRun], list[str]]:
    """The runs that can be read, and for each of the others a line that says why not."""
    read_runs, problems = [], []
    for folder in folders:
        try:
            read_runs.append((folder, read_report(folder.report), _flat(dataclasses.asdict(read(folder.config)))))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    configs = [config for _, _, config in read_runs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if _differs(key, configs)]
    names = _names([folder.path for folder, _, _ in read_runs])
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
    return Table(head, [_row(run) for run in runs], left=frozenset({0, 1, 2}))


def write_plot(runs: Sequence[ComparedRun], path: Path) -> None:
    """Losses over steps, in the format that the name of `path` asks for.

    Raises:
        ValueError: an unknown format, matplotlib is missing, or a file that cannot be written.
    """
    check_format(path)
    curves = {_label(run): _losses(run) for run in runs}
    try:
        drawn = loss_plot(curves, "png" if path.suffix == ".png" else "svg")
    except ImportError as error:
        raise ValueError(f"--out={path}: drawn with matplotlib; pip install 'pipetrain[train]' brings it") from error
    if path.suffix == ".html":
        picture = drawn.decode()
        picture = picture[picture.index("<svg") :]  # without the head of an XML file
        drawn = _page(runs, picture).encode()
    try:
        path.write_bytes(drawn)
    except OSError as error:
        raise ValueError(f"--out={path}: cannot be written ({error.strerror})") from error


def _page(runs: Sequence[ComparedRun], picture: str) -> str:
    title, caption = "Runs compared", "Loss of each step, in nats per token."
    return page(title, heading(title, level=1), paragraph(caption), picture, framed(runs_table(runs)))


def check_format(path: Path) -> None:
    """Raises:
    ValueError: nothing can be drawn into a file of this name.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--out={path}: {path.suffix or 'no ending'} is unknown; allowed are {', '.join(FORMATS)}")


def _row(run: ComparedRun) -> tuple[str, ...]:
    report = run.report
    return (
        run.name,
        report.experiment,
        _words(run.differs) or "-",
        str(report.steps),
        number(report.loss, "{:.3f}"),
        number(report.heldout_loss, "{:.3f}"),
        number(report.tokens_per_second, "{:,.0f}"),
        number(report.step_seconds_measured, "{:.4f} s"),
        number(report.bubble_fraction, "{:.1%}"),
        number(run.exposed_seconds, "{:.4f} s"),
        size(run.peak_activation_bytes),
    )


def _label(run: ComparedRun) -> str:
    return f"{run.name}: {_words(run.differs)}" if run.differs else run.name


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _losses(run: ComparedRun) -> Curve:
    lines = list(read_lines(run.folder.metrics))
    return [line["step"] for line in lines], [line["loss"] for line in lines]


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    return not key.startswith(_NOT_COMPARED) and any(config.get(key) != configs[0].get(key) for config in configs)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return dict(_entries(values, prefix))


def _entries(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _names(paths: Sequence[Path]) -> list[str]:
    """The paths without the folder that all of them share."""
    if len(paths) < 2:
        return [path.name for path in paths]
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]
