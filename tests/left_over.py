"""What a run of the tests leaves behind: processes with the ports they listen on, and files in /tmp and /dev/shm.

Every process of a run inherits the mark of the run in its environment, and the run's own folder as TMPDIR.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

MARK = "PIPETRAIN_TEST_RUN"
# Workers, fork servers and resource trackers end when the tests have ended, on a busy machine some seconds later.
PATIENCE_SECONDS = float(os.environ.get("LEFT_OVER_PATIENCE_SECONDS", "60"))
OTHERS = "(other tests run on this machine: what they have in /tmp and /dev/shm is not told apart)"
# How files are called that torch, wandb, multiprocessing and pipetrain make where TMPDIR is not looked at.
NAMES = {
    Path("/tmp"): ("pipetrain", "pymp-", "torch", "wandb", "deepspeed", "pytest"),
    Path("/dev/shm"): ("psm_", "sem.", "torch", "nccl", "wnsm_"),
}

OWN_PREFIX = "pipetrain-tests-"  # of the folder of a run
# What goes with the run's folder: pytest's own, what torch has compiled, and what torchrun, wandb and our launcher remove at
# their end, which a process that is killed does not come to.
KNOWN = re.compile(
    r"pytest-of-|torchinductor_|torchelastic_|tmp.*wandb-(media|artifacts)$|wandb-\d|pipetrain-run-\w{8}$"
)


class Watch:
    """From the start of a run of the tests to its end. The process that makes it is the run's first."""

    def __init__(self) -> None:
        self._around = os.environ.get(MARK)  # of the run that started this one, if one did
        self._mark = uuid.uuid4().hex
        os.environ[MARK] = self._mark
        self.folder = Path(tempfile.mkdtemp(prefix=OWN_PREFIX))
        self._before = {folder: self._files(folder) for folder in NAMES}
        self.folder.chmod(0o711)  # some tests let another user go through it
        self.keep = False  # for who wants to see why a test failed
        # After multiprocessing has removed its own folder there, with priority -100.
        util.Finalize(None, self._remove, exitpriority=-200)
        os.environ["TMPDIR"] = str(self.folder)
        tempfile.tempdir = None  # read TMPDIR again

    def found(self) -> list[str]:
        """A line for each process and file that the run has left. Waits for processes that are still ending."""
        lines: list[str] = []
        # Servers of this very process, where it has run tests itself: they end with it.
        if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        if resource_tracker._resource_tracker._pid is not None:  # type: ignore[attr-defined]
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (processes := self._processes(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        lines += [f"process {pid} ({_command(pid)}){_ports(pid)}" for pid in processes]
        own = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        left = [str(path) for path in self.folder.iterdir() if not KNOWN.match(path.name)]
        lines += [path for path in left if path != own]
        shared = [path for folder, before in self._before.items() for path in self._files(folder) - before]
        if shared and self._other_runs():
            return [*lines, OTHERS] if lines else []
        return lines + [str(path) for path in shared]

    def _remove(self) -> None:
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self, mark: str) -> list[int]:
        wanted = f"{MARK}={mark}".encode()
        return [pid for pid in _pids() if pid != os.getpid() and wanted in _read(pid, "environ")]

    def _other_runs(self) -> bool:
        """Whether somebody else runs tests on this machine now."""
        marks = {
            word for pid in _pids() for word in _read(pid, "environ").split(b"\0") if word.startswith(MARK.encode())
        }
        return bool(marks - {f"{MARK}={mark}".encode() for mark in (self._mark, self._around)})

    def _files(self, folder: Path) -> set[Path]:
        def is_ours(path: Path) -> bool:
            ours = path.name.startswith(NAMES[folder]) and not path.name.startswith(OWN_PREFIX)
            return ours and path.lstat().st_uid == os.getuid()

        return {path for path in folder.iterdir() if _or_false(is_ours, path)} if folder.is_dir() else set()


def _or_false(test: Callable[[Path], bool], path: Path) -> bool:
    try:
        return test(path)
    except OSError:  # gone meanwhile
        return False


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # gone, or somebody else's
        return b""


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _ports(pid: int) -> str:
    """The ports a process listens on, as ", listens on 4711"."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with_inode = os.readlink(path) if path.is_symlink() else ""
        if with_inode.startswith("socket:["):
            sockets.add(with_inode[8:-1])
    ports = []
    for name in ("tcp", "tcp6"):
        for line in _read(pid, f"net/{name}").decode().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in sockets:  # 0A: LISTEN
                ports.append(str(int(columns[1].rpartition(":")[2], 16)))
    return f", listens on {', '.join(sorted(set(ports)))}" if ports else ""
