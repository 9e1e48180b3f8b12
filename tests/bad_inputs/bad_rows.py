"""What a user may get wrong, a row each: what was typed, what lies on the disk, and what the answer must say.

Each row goes through the real entry: `pipetrain`, which refuses before a process starts, or for what only a rank can find out
`train.main` as the one rank of a run. Every answer is one line, with exit code 2 where the input is wrong.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from pipetrain import train as rank
from pipetrain.cli.main import main
from pipetrain.config.read_files import shipped
from pipetrain.monitor.folder import RunFolder

Prepare = Callable[[Path], None]
Check = Callable[["Row"], None]


@dataclass(frozen=True)
class Row:
    """`typed` after `pipetrain`; `says` must all be in the one line of the answer; `{}` in both is the folder of the row."""

    typed: str
    says: tuple[str, ...]
    prepare: Prepare = lambda folder: None
    code: int = 2
    as_rank: bool = False  # only a rank can find out
    as_nobody: bool = False  # root may read and write everything
    note: str = ""  # what lies on the disk, for the name of the test

    @property
    def name(self) -> str:
        return f"{self.note} {self.typed}".strip()


def train(typed: str, *says: str, prepare: Prepare = lambda folder: None, as_nobody: bool = False) -> Row:
    return Row(f"train experiment=smoke {typed}", says, prepare, as_nobody=as_nobody)


def files(**contents: bytes) -> Prepare:
    """Files by their names."""

    def prepare(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_bytes(content)

    return prepare


def text(**files: bytes) -> Prepare:
    """A folder `text` with these files."""

    def prepare(folder: Path) -> None:
        (folder / "text").mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / "text" / f"{name}.txt").write_bytes(content)

    return prepare


ENOUGH = text(a=b"a stage waits " * 500, b=b"a stage runs " * 500)


def a_run(folder: Path) -> None:
    """A run folder that holds a run, as far as anybody looks."""
    (folder / "run").mkdir()
    RunFolder(folder / "run").config.write_text("steps: 3\n")


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """This process without root's rights, where it has them."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)  # os.access asks for the real user
    try:
        if not os.access(shipped("conf"), os.R_OK | os.X_OK):
            pytest.skip("without root's rights this checkout cannot be read")
        yield
    finally:
        os.setresuid(0, 0, 0)


def answer(row: Row, folder: Path) -> int:
    words = row.typed.replace("{}", str(folder)).split()
    if not row.as_rank:
        return main(words)
    try:
        return rank.main(words)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
