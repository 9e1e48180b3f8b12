"""How each rank ended, left in files for the launcher: torchrun itself knows only that something was not 0."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER_VARIABLE = "PIPETRAIN_OUTCOME_DIR"  # set by the launcher for its ranks


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2  # wrong config or input, before any process starts
    DIFFERENT = 3  # `verify` found a difference
    STOPPED = 75  # stopped on request


@dataclass(frozen=True)
class Outcome:
    """The end of one rank. `message` is for the user; `run_dir` is known to rank 0."""

    rank: int
    code: int
    message: str = ""
    run_dir: str | None = None


def has_launcher() -> bool:
    """Whether `pipetrain train` started this process and reads outcomes."""
    return FOLDER_VARIABLE in os.environ


def announce(rank: int) -> None:
    """Tells the launcher which process `rank` is, so that it can end it at once."""
    if has_launcher():
        (Path(os.environ[FOLDER_VARIABLE]) / f"process-{rank:04d}").write_text(str(os.getpid()))


def processes(folder: Path) -> list[int]:
    """The process ids that ranks have announced in `folder`."""
    return [int(file.read_text()) for file in sorted(folder.glob("process-*"))]


def leave(outcome: Outcome) -> None:
    """Writes the outcome where a launcher waits for it. The first one of a rank stays."""
    if has_launcher():
        path = Path(os.environ[FOLDER_VARIABLE]) / f"rank-{outcome.rank:04d}.json"
        if not path.exists():
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(asdict(outcome)))
            draft.rename(path)


def collect(folder: Path) -> list[Outcome]:
    """The outcomes that ranks have left in `folder`, the earliest first."""
    files = sorted(folder.glob("rank-*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [Outcome(**json.loads(file.read_text())) for file in files]
