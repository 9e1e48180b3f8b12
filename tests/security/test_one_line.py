"""An error that nobody foresaw, and too little memory, are one line; the traceback of the first lies in a file that the line names."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import PIPETRAIN, complete
from small_text import make_text

from pipetrain.cli import report_command
from pipetrain.cli.main import main
from pipetrain.comm.failure import PipelineError
from pipetrain.launcher.outcome import Outcome, out_of_memory, run_as_rank


def allocate(_: object) -> Outcome:
    torch.empty(2**50)
    raise AssertionError("so much memory is nowhere")


@pytest.fixture
def line_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, Path], str]:
    """What `report` says where it raises, and the folder for temporary files is this one."""

    def answer(error: Exception, folder: Path) -> str:
        def fail(_: object) -> int:
            raise error

        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.setattr(report_command, "run", fail)
        assert main(["report"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return answer


def test_an_error_that_nobody_foresaw_is_a_line_and_a_file(
    line_of: Callable[[Exception, Path], str], tmp_path: Path
) -> None:
    line = line_of(LookupError("one\x1b[2J\ntwo"), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert line == rf"pipetrain: LookupError: one\x1b[2J; this should not happen: please report it with {kept}"
    assert "in fail" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    line = line_of(LookupError("one"), tmp_path / "gone")
    assert "its traceback cannot be kept (No such file or directory)" in line


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=repr)
def test_a_command_without_memory(error: Exception, line_of: Callable[[Exception, Path], str], tmp_path: Path) -> None:
    assert line_of(error, tmp_path).startswith("pipetrain: out of memory (")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_commands_and_ranks_under_a_limit_of_memory(tmp_path: Path) -> None:
    """One line, whatever it is that does not fit: modules, the threads of a rank, or its tensors."""
    run = [*PIPETRAIN, "experiment=smoke", "pipeline.num_stages=2", "steps=2", "observe.progress=false"]
    words = shlex.join([*run, *make_text(tmp_path / "text")])
    ended = []
    for megabytes in (300, 600, 900, 1200, 1500, 1800):
        command = f"ulimit -v {megabytes * 1024}; exec {words} run_dir={tmp_path / str(megabytes)}"
        ended.append(complete(tmp_path, ["bash", "-c", command]))
        if ended[-1].returncode == 0:
            break
        assert ended[-1].returncode == 1, ended[-1].stderr
        (line,) = ended[-1].stderr.splitlines()
        assert re.match(r"pipetrain: (rank \d: )?out of memory \(.+\); more stages", line), line
    assert len(ended) > 2, "the limits are too large to be felt"


def test_an_error_while_memory_is_missing_is_told_as_that_and_one_of_another_rank_is_not() -> None:
    no_thread = RuntimeError("can't start new thread")

    def fail_twice() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback({}.__getitem__, "on the way out")
            raise MemoryError

    with pytest.raises(LookupError) as second:
        fail_twice()
    assert str(out_of_memory(second.value)).startswith("out of memory (of Python)")
    assert str(out_of_memory(no_thread)).startswith("out of memory (can't start new thread)")
    assert out_of_memory(PipelineError(f"rank 0 failed: RuntimeError: {no_thread}")) is None
    assert out_of_memory(ValueError(str(no_thread))) is None


def test_a_rank_without_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run_as_rank(allocate, PipelineError) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipetrain: rank 0: out of memory (")
    assert "4503599627370496 bytes" in line
