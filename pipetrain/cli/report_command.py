"""`pipetrain report`: prints what a run did, measured and predicted; or compares several runs.

For several runs it prints the keys that differ and the results, and draws their losses in one plot.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipetrain.cli.advice import advice_on
from pipetrain.cli.main import Arguments, Parser, add_json, ending_of, present, refuse, writing
from pipetrain.config.load import read
from pipetrain.config.phases import leaves
from pipetrain.config.problem import shown
from pipetrain.config.read_files import read_json
from pipetrain.launcher.outcome import Exit
from pipetrain.monitor.draw.page import charts_of, heading, page, paragraph
from pipetrain.monitor.draw.table import Table, number, size
from pipetrain.monitor.folder import RunFolder, find_folders
from pipetrain.monitor.lines import read_lines
from pipetrain.monitor.report import RunReport, as_markdown, most, read_report, words_of

_FORMATS = (".svg", ".png", ".html")
# Keys that do not change what a run computes.
_NOT_COMPARED = ("run_dir", "resume", "experiment", "observe.", "snapshot.", "cost.")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run folder, `latest` (default) or a sweep folder; several are compared",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="draw the loss of each run over its steps, as FILE.svg, .png or .html"
    )
    add_json(parser)


def run(arguments: Arguments) -> int:
    folders = [folder for run in arguments.runs or ["latest"] for folder in find_folders(run)]
    if len(folders) > 1 or arguments.out is not None:
        return _compare(folders, arguments)
    report, advice = read_report(folders[0].report), advice_on(folders[0])
    next_steps = f"\n\n## What to do next\n\n{chr(10).join(f'- {one}' for one in advice)}" if advice else ""
    present(
        arguments,
        lambda: as_markdown(report).removesuffix("\n") + next_steps,
        lambda: {**asdict(report), "advice": list(map(asdict, advice))},
    )
    return Exit.DONE


def _compare(folders: Sequence[RunFolder], arguments: Arguments) -> int:
    """Compares the runs that can be read. If a run cannot be read, stderr names it and the exit code is not 0."""
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        ending_of(out, _FORMATS)
    runs, problems = _read_runs(folders)
    present(arguments, lambda: _table(runs).as_markdown() if runs else "", lambda: [run.as_json() for run in runs])
    if runs and out is not None:
        _write_plot(runs, out)
    for problem in problems:
        refuse(problem)
    return Exit.WRONG_INPUT if problems else Exit.DONE


def reported(run_dir: str | None) -> Any:
    """The report of the run in this folder, as plain values; None: there is no report, or no run."""
    report = None if run_dir is None else RunFolder(Path(run_dir)).report
    return read_json(report, "the run itself is not harmed") if report is not None and report.is_file() else None


@dataclass(frozen=True)
class _ComparedRun:
    """One finished run."""

    name: str  # short, and different for each run
    folder: RunFolder
    report: RunReport
    differs: Mapping[str, Any]  # the keys whose values differ between the compared runs

    def as_json(self) -> dict[str, Any]:
        return {"run": str(self.folder.path), "differs": dict(self.differs), **asdict(self.report)}


def _read_runs(folders: Sequence[RunFolder]) -> tuple[list[_ComparedRun], list[str]]:
    """The runs that can be read, and for each of the others a line that says why not."""
    read_runs, problems = [], []
    for folder in folders:
        try:
            read_runs.append((folder, read_report(folder.report), dict(leaves(asdict(read(folder.config))))))
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
        _ComparedRun(name, folder, report, {key: config.get(key) for key in keys})
        for name, (folder, report, config) in zip(names, read_runs)
    ]
    return runs, problems


def _table(runs: Sequence[_ComparedRun]) -> Table:
    """A line per run; there is one at least."""
    rows = [
        {
            "run": run.name,
            "experiment": report.experiment,
            "differs in": _words(run.differs) or "-",
            "steps": str(report.steps),
            "loss": number(report.loss, "{:.3f}"),
            "held-out": number(report.heldout_loss, "{:.3f}"),
            "tokens/s": number(report.tokens_per_second, "{:,.0f}"),
            "step": number(report.step_seconds_measured, "{:.4f} s"),
            "bubble": number(report.bubble_fraction, "{:.1%}"),
            "exposed R": number(sum(value or 0.0 for value in report.recompute_exposed_seconds), "{:.4f} s"),
            "peak activations": size(most(report.peak_activation_bytes)),
        }
        for run, report in ((run, run.report) for run in runs)
    ]
    values = [tuple(row.values()) for row in rows]
    return Table(tuple(rows[0]), values, left=frozenset({0, 1, 2}), words=words_of(rows[0]))


def _write_plot(runs: Sequence[_ComparedRun], path: Path) -> None:
    """Losses over steps, a curve per run, in the format that the name of `path` asks for; on a page above their table."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--out={path}: drawn with matplotlib; pip install 'pipetrain[train]' brings it") from error
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")  # without pyplot, which would look for a screen
    axis = figure.subplots()
    for run in runs:
        curve = charts_of(list(read_lines(run.folder.metrics)))
        name = f"{run.name}: {_words(run.differs)}" if run.differs else run.name
        axis.plot(curve["steps"], curve["lines"][0]["values"], label=name, linewidth=1.2)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    target, is_png = io.BytesIO(), path.suffix == ".png"
    metadata = {} if is_png else {"Date": None}  # the same picture, the same file
    figure.savefig(target, format="png" if is_png else "svg", dpi=120, metadata=metadata)
    drawn = target.getvalue()
    if path.suffix == ".html":
        picture = drawn[drawn.index(b"<svg") :].decode()  # without the head of an XML file
        title, caption = "Runs compared", paragraph("Loss of each step, in nats per token.")
        drawn = page(title, heading(title, level=1), caption, picture, _table(runs).as_html()).encode()
    with writing(f"--out={path}"):
        path.write_bytes(drawn)


def _words(values: Mapping[str, Any]) -> str:
    lists = {key: f"[{','.join(map(str, value))}]" for key, value in values.items() if isinstance(value, (list, tuple))}
    return " ".join(f"{key}={lists.get(key) or shown(value)}" for key, value in values.items())
