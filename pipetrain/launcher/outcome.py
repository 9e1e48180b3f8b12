"""How each rank ended, left in files for the launcher: torchrun itself knows only that something was not 0."""

from __future__ import annotations

import enum
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from pipetrain.launcher.stuck import watch_torchrun

FOLDER_VARIABLE = "PIPETRAIN_OUTCOME_DIR"  # set by the launcher for its ranks
LAUNCHER_VARIABLE = "PIPETRAIN_LAUNCHER"  # its process id, likewise
_RUN_DIR = "run-dir"


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2  # wrong config or input, before any process starts
    DIFFERENT = 3  # `verify` found a difference
    STOPPED = 75  # stopped on request


@dataclass(frozen=True)
class Outcome:
    """How a rank, or the whole run, ended. `message` is for the user."""

    rank: int
    code: int
    message: str = ""
    run_dir: str | None = None


def has_launcher() -> bool:
    """Whether `pipetrain train` started this process and reads outcomes."""
    return FOLDER_VARIABLE in os.environ


def announce(rank: int) -> None:
    """Tells the launcher which process `rank` is, so that it can end it at once."""
    _tell_launcher(f"process-{rank:04d}", str(os.getpid()))


def announce_run_dir(path: str) -> None:
    """Tells the launcher the run folder, which is there even if the run fails."""
    _tell_launcher(_RUN_DIR, path)


def _tell_launcher(name: str, text: str) -> None:
    """In a file of its folder, whole or not at all. The first text under a name stays."""
    if has_launcher() and not (path := Path(os.environ[FOLDER_VARIABLE]) / name).exists():
        draft = path.with_name(f".{name}")
        draft.write_text(text)
        draft.rename(path)


def run_dir_of(folder: Path) -> str | None:
    """The run folder that rank 0 has announced in `folder`."""
    file = folder / _RUN_DIR
    return file.read_text() if file.is_file() else None


def processes(folder: Path) -> list[int]:
    """The process ids that ranks have announced in `folder`."""
    return [int(file.read_text()) for file in sorted(folder.glob("process-*"))]


def leave(outcome: Outcome) -> None:
    """Writes the outcome where a launcher waits for it. The first one of a rank stays."""
    _tell_launcher(f"rank-{outcome.rank:04d}.json", json.dumps(asdict(outcome)))


def end(outcome: Outcome) -> int:
    """Ends a rank: its outcome goes to the launcher, or to the user where there is none; what all ranks say once a machine.
    Returns the exit code.

    Under a launcher a run that was stopped ends with 0: anything else makes torchrun end the ranks that still write.
    """
    if outcome.code == Exit.FAILED:
        watch_torchrun(outcome.message if has_launcher() else "")
    if has_launcher():
        leave(outcome)
        return Exit.DONE if outcome.code == Exit.STOPPED else outcome.code
    is_first_here = outcome.rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    return tell(outcome) if is_first_here or outcome.code == Exit.FAILED else outcome.code


def run_as_rank(work: Callable[[int], Outcome], pipeline_error: type[Exception]) -> int:
    """Runs `work` as the rank of this process, which it is given, and ends it with the outcome, or with what an error makes of it;
    `pipeline_error` says itself which rank failed in what. Returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    announce(rank)
    try:
        outcome = work(rank)
    except ValueError as error:
        outcome = Outcome(rank, Exit.WRONG_INPUT, str(error))
    except pipeline_error as error:
        outcome = Outcome(rank, Exit.FAILED, str(error))
    except KeyboardInterrupt:
        outcome = Outcome(rank, Exit.FAILED, "interrupted")
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(rank, Exit.FAILED, f"rank {rank}: {type(error).__name__}: {error}")
    return end(outcome)


def leave_process(code: int) -> NoReturn:
    """Past a failure threads may still wait for ranks that are gone: nothing is joined."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell(outcome: Outcome, *, quiet: bool = False) -> int:
    """Says how the run ended, the run folder as the last line of stdout unless `quiet`; returns the exit code."""
    if outcome.run_dir is not None and not quiet:
        print(f"run folder: {outcome.run_dir}", flush=True)
    if outcome.message:
        print(f"pipetrain: {outcome.message}", file=sys.stderr, flush=True)
    return outcome.code


def collect(folder: Path) -> list[Outcome]:
    """The outcomes that ranks have left in `folder`, the earliest first."""
    files = sorted(folder.glob("rank-*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [Outcome(**json.loads(file.read_text())) for file in files]
