"""How a rank ends: on request, between two steps, and what it leaves in files for the launcher: torchrun itself knows only that something was not 0."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from pipetrain.config.terminal import printable, say

FOLDER_VARIABLE = "PIPETRAIN_OUTCOME_DIR"  # set by the launcher for its ranks
LAUNCHER_VARIABLE = "PIPETRAIN_LAUNCHER"  # its process id, likewise
_PREFIX = "pipetrain-run-"
_RUN_DIR = "run-dir"
_MOST_TOLD = 200  # characters of what torch says
# What torch, the interpreter and the loader of libraries say, of tensors, threads and code.
_NO_MEMORY = re.compile("can't allocate memory|bad_alloc|start new thread|Resource temporarily unavailable|map segment")


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2  # wrong config or input, before any process starts
    DIFFERENT = 3  # `verify` found a difference
    STOPPED = 75  # stopped on request


@dataclass(frozen=True)
class Outcome:
    """How a rank, or the whole run, ended. `message` is for the user; `waited`: it failed because it waited for a rank that did."""

    rank: int
    code: int
    message: str = ""
    run_dir: str | None = None
    waited: bool = False


def has_launcher() -> bool:
    """Whether `pipetrain train` started this process and reads outcomes."""
    return FOLDER_VARIABLE in os.environ


def announce(rank: int) -> None:
    """Tells the launcher which process `rank` is, so that it can end it at once. What they share stays until both are gone."""
    if has_launcher():
        folder = Path(os.environ[FOLDER_VARIABLE])
        hold(folder)
        # The sockets of its worker processes go with that folder; in one of the rank's own they would stay where it is killed.
        multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
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
    except KeyboardInterrupt:
        outcome = Outcome(rank, Exit.FAILED, "interrupted")
    except Exception as error:
        if (told := out_of_memory(error)) is not None:
            outcome = Outcome(rank, Exit.FAILED, f"rank {rank}: {told}")
        elif isinstance(error, pipeline_error):
            outcome = Outcome(rank, Exit.FAILED, str(error), waited=True)
        else:
            traceback.print_exc()
            outcome = Outcome(rank, Exit.FAILED, f"rank {rank}: {type(error).__name__}: {error}")
    return end(outcome)


def out_of_memory(error: BaseException) -> str | None:
    """The message for the user where there is too little memory, of the process or of a device; None: it is another error. What fails because
    of such an error, or while it is handled, counts."""
    text = next(iter(str(error).strip().splitlines()), "")
    ours = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    # Said by this rank itself: a PipelineError may repeat what another one said.
    said = type(error) in (RuntimeError, ImportError) and _NO_MEMORY.search(text)
    if ours or said or type(error).__name__ == "OutOfMemoryError":  # torch's
        return (
            f"out of memory ({text[-_MOST_TOLD:] or 'of Python'}); more stages or microbatches need less on a rank, and `ulimit -v` may "
            "set a limit"
        )
    before = error.__cause__ or error.__context__
    return None if before is None else out_of_memory(before)


def leave_process(code: int) -> NoReturn:
    """Past a failure threads may still wait for ranks that are gone: nothing is joined."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The folder of the sockets of worker processes: the exit handler that removes it does not run. A launcher removes its own.
    sockets = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if sockets is not None and not has_launcher() and multiprocessing.parent_process() is None:  # else the parent's
        shutil.rmtree(sockets, ignore_errors=True)
    os._exit(code)


def tell(outcome: Outcome, *, quiet: bool = False) -> int:
    """Says how the run ended, the run folder as the last line of stdout unless `quiet`; returns the exit code."""
    if outcome.run_dir is not None and not quiet:
        print(f"run folder: {printable(outcome.run_dir)}", flush=True)
    if outcome.message:
        say(outcome.message)
    return outcome.code


def collect(folder: Path) -> list[Outcome]:
    """The outcomes that ranks have left in `folder`, the earliest first."""
    files = sorted(folder.glob("rank-*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [Outcome(**json.loads(file.read_text())) for file in files]


# The launcher's folder among the temporary files: ranks meet there, and nobody else can open it ----------------------


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder of mode 0700, which is removed at the end. A launcher that is killed leaves it, and the next one of the same user sweeps
    it as soon as no rank is in it."""
    _sweep()
    folder, held = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def hold(folder: Path) -> int:
    """The descriptor that keeps the folder from being swept: as long as it is open, so for the life of a process that leaves it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # swept before it was held
            held = hold(folder)
            if folder.exists():
                return folder, held
            os.close(held)


def _sweep() -> None:
    """Removes what nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, a link, somebody else sweeps it, or a run is in it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


# Stopping on request: the ranks agree between two steps, a second signal ends at once --------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SLURM sends USR1 before the time is up
# A terminal's Ctrl-C goes to every process of the group, and torchrun forwards its own copy to the ranks: one request.
ONE_REQUEST_SECONDS = 1.0


@contextlib.contextmanager
def handled(
    handle: Callable[[int, FrameType | None], None], signals: Iterable[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """`handle` gets these signals while the block runs."""
    before = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def ending_with_the_launcher() -> Iterator[None]:
    """While it is open the kernel ends this process where whoever started it dies.

    For the time in which ranks look for each other: they would wait for a store that died with torchrun until their time-out,
    and have nothing to save yet.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if not sys.platform.startswith("linux") or launcher is None:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before
        os._exit(128 + signal.SIGKILL)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PDEATHSIG, 0)


class StopRequest:
    """While it is open, SIGINT, SIGTERM and SIGUSR1 are kept in `signum` instead of ending the process.

    A launcher that is gone counts as a request too: nobody is left who would forward one.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._asked_at = 0.0
        self._parent = os.getppid()
        self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    @property
    def signum(self) -> int:
        """The signal that asked to stop; 0: none."""
        return self._signum or (signal.SIGHUP if os.getppid() != self._parent else 0)

    def __enter__(self) -> Self:
        for signum in SIGNALS:
            signal.signal(signum, self._handle)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:  # the launcher ends ranks that wait for this one, and this one has yet to say why
            return
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signum and now - self._asked_at > ONE_REQUEST_SECONDS:
            sys.stderr.write("pipetrain: second signal, ending at once\n")
            sys.stderr.flush()
            os._exit(128 + signum)
        if not self._signum:
            self._signum, self._asked_at = signum, now
