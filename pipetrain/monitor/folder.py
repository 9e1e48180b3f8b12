"""The run folder: where everything that a run leaves behind has its name."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetrain.config.read_files import read_object
from pipetrain.plan.profile import PROFILE

RUNS = Path("runs")
LATEST = "latest"
FORMAT_VERSION = 1  # of report.json and timeline.json
SWEEP_JOBS = "jobs"  # in a sweep folder: a file per job that says how it ended
_MODE = 0o750  # the owner writes, the group reads, others have no business here


class _Named:
    """What has a fixed name in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths inside one run folder."""

    path: Path

    config = _Named("config.yaml")
    plan = _Named("plan.json")
    schedule = _Named("schedule.csv")
    profile = _Named(PROFILE)
    layers = _Named("layers.json")  # of plan=auto: the profile of layers, and the keys
    planned = _Named("planned.json")
    metrics = _Named("metrics.jsonl")
    heldout = _Named("heldout.jsonl")
    wandb = _Named("wandb")
    tensorboard = _Named("tensorboard")
    report = _Named("report.json")
    report_text = _Named("report.md")
    timeline = _Named("timeline.html")
    recorded = _Named("timeline.json")
    weights = _Named("weights")
    model = _Named("model")
    inspect = _Named("inspect")

    def phase(self, number: int) -> RunFolder:
        """What there is of a phase by itself, under the same names: its plan, its schedule, and when it is over its report, page and profile."""
        return RunFolder(self.path / "phases" / str(number))

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank:04d}.jsonl"

    def create(self, *, again: bool = False) -> None:
        """Makes the folder, and `runs/latest` point to it where it lies in `runs/`. `again`: a run may be in it, which goes on.

        Raises:
            ValueError: a run is in it already, or it cannot be made.
        """
        if not again:
            check_free(str(self.path))
        try:
            for folder in (self.path, self.path / "events", self.path / "weights"):
                folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run_dir={self.path}: the folder cannot be made ({error.strerror})") from error
        if self.path.is_relative_to(RUNS.resolve()):
            # Replaces the link in one step: whoever follows it meanwhile finds the old run or the new one.
            draft = RUNS / f".{LATEST}-{os.getpid()}"
            draft.unlink(missing_ok=True)
            draft.symlink_to(os.path.relpath(self.path, RUNS.resolve()), target_is_directory=True)
            draft.replace(RUNS / LATEST)


def check_free(run_dir: str | None) -> None:
    """Raises:
    ValueError: there is a run in the folder already, it is a file, or it cannot be made.
    """
    if run_dir is None:
        return
    if RunFolder(Path(run_dir)).config.exists():
        raise ValueError(f"run_dir={run_dir}: there is a run in this folder; choose another, or leave run_dir out")
    if Path(run_dir).exists() and not Path(run_dir).is_dir():
        raise ValueError(f"run_dir={run_dir}: this is a file; choose a folder that may be new")
    there = next(path for path in (Path(run_dir).absolute(), *Path(run_dir).absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"run_dir={run_dir}: {there} is a file, so no folder can be made in it; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"run_dir={run_dir}: {there} may not be written by this user; choose another, or allow it")


def choose_folder(run_dir: str | None, experiment: str) -> RunFolder:
    """`run_dir`, or `runs/<date>/<time>-<experiment>`; with a number behind it where two runs start in one second."""
    if run_dir is not None:
        return RunFolder(Path(run_dir).resolve())
    now = time.localtime()
    name = f"{time.strftime('%H-%M-%S', now)}-{experiment}"
    day = RUNS.resolve() / time.strftime("%Y-%m-%d", now)
    path, number = day / name, 2
    while path.exists():
        path, number = day / f"{name}-{number}", number + 1
    return RunFolder(path)


def reserve_folder(run_dir: str | None, experiment: str) -> RunFolder:
    """`choose_folder`, and makes the folder where its name is chosen: of two runs that start at once, each gets its own.

    Raises:
        ValueError: it cannot be made.
    """
    folder = choose_folder(run_dir, experiment)
    try:
        folder.path.mkdir(mode=_MODE, parents=True, exist_ok=run_dir is not None)
    except FileExistsError:
        if run_dir is None:
            return reserve_folder(run_dir, experiment)  # another run has just taken the name
        raise ValueError(f"run_dir={run_dir}: this is a file; choose a folder that may be new") from None
    except OSError as error:
        raise ValueError(f"run_dir={folder.path}: the folder cannot be made ({error.strerror})") from error
    return folder


def find_folder(run: str) -> RunFolder:
    """The folder that a user names: a path, or `latest`.

    Raises:
        ValueError: there is no such run.
    """
    path = RUNS / LATEST if run == LATEST else Path(run)
    if not (path / "config.yaml").is_file():
        other = "give the path that `run folder:` named, or `latest`"
        hint = "train first, or give the path of a run folder" if run == LATEST else other
        raise ValueError(f"{run}: there is no run ({path}/config.yaml is missing); {hint}")
    return RunFolder(path.resolve())


def find_folders(run: str) -> list[RunFolder]:
    """The run that a user names; of a sweep folder, the runs of its jobs in their order.

    Raises:
        ValueError: there is no such run.
    """
    jobs = sorted((Path(run) / SWEEP_JOBS).glob("*.json"))
    if not jobs:
        return [find_folder(run)]
    return [find_folder(str(read_object(job, "name the runs themselves").get("run_dir"))) for job in jobs]


def read_current(path: Path, missing: str, todo: str) -> dict[str, Any]:
    """The object in a JSON file of a run folder.

    Raises:
        ValueError: there is none, which means what `missing` says, or another version wrote it; DamagedFile: it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {missing}")
    values = read_object(path, todo)
    if (version := values.get("format_version")) != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version={version}, this pipetrain reads {FORMAT_VERSION}")
    return values
