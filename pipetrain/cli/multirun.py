"""`pipetrain train --multirun`: a run for each combination of values, and how each of them ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from pipetrain.cli.command import Arguments, refuse
from pipetrain.cli.report_command import reported
from pipetrain.config.records import RunConfig
from pipetrain.launcher.outcome import Exit
from pipetrain.observe.output import STDOUT, write_json
from pipetrain.sweep import Job, sweep
from pipetrain.timeline.draw.table import Table


def run_all(arguments: Arguments, check: Callable[[RunConfig], object]) -> int:
    """Each job is asked for by `check` before any starts; returns the exit code of the whole."""
    folder, jobs = sweep(arguments.overrides, check)
    if arguments.json is not None:
        write_json([{**asdict(job), "report": reported(job.run_dir)} for job in jobs], arguments.json)
    if arguments.json != STDOUT:
        print(_as_table(jobs))
        print(f"sweep folder: {folder}", flush=True)
    return _verdict(folder, jobs)


def _as_table(jobs: Sequence[Job]) -> str:
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    swept = [" ".join(text for text in job.overrides if text not in shared) for job in jobs]
    rows = [(str(job.number), words, str(job.code), job.run_dir or "-") for job, words in zip(jobs, swept)]
    return Table(("job", "overrides", "exit code", "run folder"), rows).as_markdown()


def _verdict(folder: Path, jobs: Sequence[Job]) -> int:
    """Names the jobs that failed; the exit code."""
    bad = [job for job in jobs if job.code not in (Exit.DONE, Exit.STOPPED)]
    for job in bad:
        how = f"ended with exit code {job.code}: see its messages" if job.code else "did not say how it ended"
        how = "was not started" if job.run_dir is None else how
        refuse(f"job {job.number} ({' '.join(job.overrides)}) {how}; its files: {job.run_dir or folder}")
    if any(job.run_dir is not None for job in bad) or all(job.run_dir is None for job in jobs):
        return Exit.FAILED
    return Exit.STOPPED if any(job.code != Exit.DONE for job in jobs) else Exit.DONE
