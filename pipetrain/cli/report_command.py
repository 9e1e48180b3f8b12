"""`pipetrain report`: what a run did, and what it was predicted to do; or several runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipetrain.cli.command import Arguments, Command, Parser, add_json, present, refuse
from pipetrain.launcher.outcome import Exit
from pipetrain.observe.compare import check_format, compare, runs_table, write_plot
from pipetrain.observe.folder import RunFolder, find_folders
from pipetrain.observe.report import as_markdown, read_report


def _add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run folder, `latest` (default) or a sweep folder; several are compared",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write FILE.svg, .png or .html: the loss of each run over its steps"
    )
    add_json(parser)


def _report(arguments: Arguments) -> int:
    folders = [folder for run in arguments.runs or ["latest"] for folder in find_folders(run)]
    if len(folders) > 1 or arguments.out is not None:
        return _compare(folders, arguments)
    report = read_report(folders[0].report)
    present(arguments, lambda: as_markdown(report).removesuffix("\n"), lambda: asdict(report))
    return Exit.DONE


def _compare(folders: Sequence[RunFolder], arguments: Arguments) -> int:
    """What can be read is told; a run that cannot is named, and then the exit code is not 0."""
    if arguments.out is not None:
        check_format(Path(arguments.out))
    runs, problems = compare(folders)
    table = runs_table(runs).as_markdown() if runs else ""
    present(arguments, lambda: table, lambda: [run.as_json() for run in runs])
    if runs and arguments.out is not None:
        write_plot(runs, Path(arguments.out))
    for problem in problems:
        refuse(problem)
    return Exit.WRONG_INPUT if problems else Exit.DONE


def reported(run_dir: str | None) -> Any:
    """What the run in this folder has reported, as plain values; None: nothing, or there was no run."""
    if run_dir is None:
        return None

    report = RunFolder(Path(run_dir)).report
    return json.loads(report.read_text()) if report.is_file() else None


COMMAND = Command(_add_arguments, _report)
