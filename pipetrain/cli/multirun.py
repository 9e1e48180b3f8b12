"""`pipetrain train --multirun`: several runs by Hydra's multirun, whose task is `pipetrain train` in a run folder of its own.

A launcher of Hydra (basic, submitit_local, submitit_slurm) calls `run_job` once per job, in this process or in one on another
machine. Each job writes its exit code to `<sweep folder>/jobs/`, so a job whose process has died is noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipetrain.cli.main import Arguments, present, refuse
from pipetrain.cli.report_command import reported
from pipetrain.config.load import Source, UserFolder, load_config
from pipetrain.config.problem import ConfigError, opening_line
from pipetrain.config.read_files import read_object, shipped
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import is_free
from pipetrain.config.secrets import check_override
from pipetrain.config.write_files import replace_file
from pipetrain.launcher.outcome import Exit, handled
from pipetrain.monitor.draw.table import Table
from pipetrain.monitor.folder import SWEEP_JOBS, reserve_folder

_LAUNCHER, _LAUNCHERS = "hydra/launcher", ("basic", "submitit_local", "submitit_slurm")
_SWEEP_DIR, _SWEEP_SUBDIR = "hydra.sweep.dir", "hydra.sweep.subdir"
_NEW_KEY = "++"
# Signals that stop a run, and the signal that the run gets. SLURM and submitit send USR1 or USR2 before the time limit.
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR1,
}


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    number: int  # from 0
    overrides: tuple[str, ...]
    run_dir: str | None = None  # None: not started
    code: int | None = None  # its exit code; None: unknown


def run_all(arguments: Arguments, check: Callable[[RunConfig], object]) -> int:
    """Starts a run for each combination of values, after `check` has accepted every job. Returns the exit code of the sweep."""
    folder, jobs = sweep(arguments.overrides, check)
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    swept = [" ".join(text for text in job.overrides if text not in shared) for job in jobs]
    rows = [(str(job.number), words, str(job.code), job.run_dir or "-") for job, words in zip(jobs, swept)]
    table = Table(("job", "overrides", "exit code", "run folder"), rows).as_markdown()
    values = [{**asdict(job), "report": reported(job.run_dir)} for job in jobs]
    present(arguments, lambda: f"{table}\nsweep folder: {folder}", lambda: values)
    bad = [job for job in jobs if job.code not in (Exit.DONE, Exit.STOPPED)]
    for job in bad:
        how = f"ended with exit code {job.code}: see its messages" if job.code else "did not say how it ended"
        how = "was not started" if job.run_dir is None else how
        refuse(f"job {job.number} ({' '.join(job.overrides)}) {how}; its files: {job.run_dir or folder}")
    if any(job.run_dir is not None for job in bad) or all(job.run_dir is None for job in jobs):
        return Exit.FAILED
    return Exit.STOPPED if any(job.code != Exit.DONE for job in jobs) else Exit.DONE


def sweep(overrides: Sequence[str], check: Callable[[RunConfig], object]) -> tuple[Path, list[Job]]:
    """Runs all jobs of `overrides`; returns the sweep folder and the jobs with their exit codes.

    Raises:
        ConfigError: the configuration of a job cannot run (`check`). No job has started then.
    """
    source, overrides = Source.of(overrides)
    ours = [text for text in overrides if not _is_hydras(text)]
    hydras = [text for text in overrides if _is_hydras(text)]
    jobs = expand(ours)
    experiment = _check_jobs(jobs, check, source.words)
    _check_hydra(hydras)
    named = [text.partition("=")[2] for text in hydras if text.startswith(f"{_SWEEP_DIR}=")]
    folder = Path(named[-1]).resolve() if named else reserve_folder(None, f"{experiment}-sweep").path
    for file in (folder / SWEEP_JOBS).glob("*.json"):  # of a sweep that is run again
        file.unlink()
    chosen = [text for text in hydras if not text.startswith(f"{_SWEEP_DIR}=")]
    # A key within `model.args` and its like is new to Hydra.
    known = [_NEW_KEY + text if is_free(text.partition("=")[0]) else text for text in ours]
    # Hydra ends the process if a job's process dies, and a request to stop ends the sweep: the result of every job is read below.
    words = ["--multirun", *known, *chosen, f"{_SWEEP_DIR}={_quoted(str(folder))}"]
    UserFolder.folder = source.folder
    before, sys.argv = sys.argv, ["pipetrain", *words]  # from which hydra.main reads its arguments
    try:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            hydra.main(version_base="1.3", config_path=str(shipped("conf")), config_name=source.name)(run_job)()
    finally:
        sys.argv = before
    GlobalHydra.instance().clear()
    ended = [_file_of(folder, job) for job in jobs]
    results = [read_object(file, "remove it") if file.is_file() else {} for file in ended]
    return folder, [replace(job, run_dir=one.get("run_dir"), code=one.get("code")) for job, one in zip(jobs, results)]


def run_job(config: Any) -> int:
    """The task that Hydra's launchers call: `pipetrain train` with this job's overrides; returns its exit code.

    Raises:
        KeyboardInterrupt: the sweep was asked to stop; jobs that wait in this process are not started.
    """
    runtime = HydraConfig.get()
    job = Job(
        number=int(runtime.job.num),
        overrides=tuple(text.removeprefix(_NEW_KEY) for text in runtime.overrides.task),
        run_dir=str(Path(config.run_dir or runtime.runtime.output_dir).resolve()),
    )
    folder = Path(runtime.sweep.dir)
    _write(folder, job)
    overrides = [text for text in job.overrides if not text.startswith("run_dir=")]
    folders = [str(one.path) for one in runtime.runtime.config_sources if one.provider == "user"]
    source = Source(folders[0] if folders else None, str(runtime.job.config_name))
    words = [*source.words, *overrides, f"run_dir={_quoted(str(job.run_dir))}"]
    code, asked = _run([sys.executable, "-m", "pipetrain.cli", "train", *words])
    _write(folder, replace(job, code=code))
    if asked and runtime.launcher._target_.endswith(".BasicLauncher"):
        raise KeyboardInterrupt
    return code


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """Runs `command` with its stdout on our stderr and forwards signals to stop. Returns its exit code, and whether there was a signal."""
    asked: list[signal.Signals] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        asked.append(_FORWARDED[signal.Signals(signum)])
        for process in started:
            process.send_signal(asked[-1])

    with handled(forward, _FORWARDED):
        started.append(subprocess.Popen(command, stdout=sys.stderr.fileno()))
        for signum in asked:  # signals that arrived while it was started
            started[0].send_signal(signum)
        code = started[0].wait()
    return (code if code >= 0 else Exit.FAILED), bool(asked)


def expand(overrides: Sequence[str]) -> list[Job]:
    """The jobs, made and numbered as Hydra's basic sweeper does it (it gives no list before it starts them)."""
    values: dict[str, list[str]] = {}
    try:
        for one in OverridesParser.create().parse_overrides(list(overrides)):
            key, is_swept = one.get_key_element(), one.is_sweep_override()
            if is_swept and not one.is_discrete_sweep():
                raise HydraException("an interval is no list of values; write them down, as in seed=1,2,3")
            texts = one.sweep_string_iterator() if is_swept else [one.get_value_element_as_str()]
            values[key] = [f"{key}={text}" for text in texts]
    except HydraException as error:
        raise ConfigError(f"{' '.join(overrides)}: {opening_line(error)}") from error
    return [Job(number, words) for number, words in enumerate(itertools.product(*values.values()))]


def _check_jobs(jobs: Sequence[Job], check: Callable[[RunConfig], object], source: Sequence[str]) -> str:
    """Checks that every job can run and has a folder of its own; returns the name of the experiment."""
    seen: dict[Path, int] = {}
    for job in jobs:
        try:
            config = load_config([*source, *job.overrides])
            check(config)
        except ValueError as error:
            raise ConfigError(f"job {job.number} ({' '.join(job.overrides)}): {error}") from error
        if config.run_dir is not None and seen.setdefault(Path(config.run_dir).resolve(), job.number) != job.number:
            raise ConfigError(
                f"run_dir={config.run_dir}: jobs {seen[Path(config.run_dir).resolve()]} and {job.number} would share it; leave it out, "
                "or name in it what is swept, as in 'run_dir=runs/mine/${seed}'"
            )
    return config.experiment


def _check_hydra(overrides: Sequence[str]) -> None:
    """Checks Hydra's own keys, such as the launcher. Only listed values are allowed: with others Hydra would run any code."""
    for text in overrides:
        check_override(text)
        key, _, value = text.lstrip("+~").partition("=")
        if key == _LAUNCHER and value not in _LAUNCHERS:
            raise ConfigError(f"{text}: allowed is {', '.join(_LAUNCHERS)}")
        if key not in (_LAUNCHER, _SWEEP_DIR, _SWEEP_SUBDIR) and not key.startswith("hydra.launcher."):
            raise ConfigError(
                f"{text}: of Hydra's own keys a sweep takes {_LAUNCHER}, hydra.launcher.NAME, {_SWEEP_DIR} and {_SWEEP_SUBDIR}"
            )
    try:
        with initialize_config_dir(str(shipped("conf")), version_base="1.3", job_name="pipetrain"):
            compose("config", overrides=list(overrides))
    except HydraException as error:
        reason = ", ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(
            f"{' '.join(overrides)}: {reason}; pip install 'pipetrain[sweep]' brings submitit_local and submitit_slurm"
        ) from error


def _is_hydras(override: str) -> bool:
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


def _quoted(text: str) -> str:
    """Text quoted so that Hydra reads any characters in it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _file_of(folder: Path, job: Job) -> Path:
    return folder / SWEEP_JOBS / f"{job.number:04d}.json"


def _write(folder: Path, job: Job) -> None:
    path = _file_of(folder, job)
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(job), indent=2) + "\n")
