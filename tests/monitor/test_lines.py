"""Files of lines: what stays when a run goes on, and what a disk does that can take no more."""

import json
import os
from pathlib import Path

import pytest

from pipetrain.monitor.lines import LineFile


def lines(*steps: int) -> list[str]:
    return [json.dumps({"step": step}) + "\n" for step in steps]


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_that_goes_on_keeps_the_steps_before_and_drops_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines(1, 2, 2, 3, 4)) + '{"step": 5')
    file = LineFile(path, first_step=4)
    file.write(lines(4, 5))
    file.close()
    assert steps_in(path) == [1, 2, 2, 3, 4, 5]


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of an older run")
    LineFile(tmp_path / "metrics.jsonl").close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_full_disk_costs_lines_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.write(lines(1))

    class Full:
        """Takes three bytes and then no more, as a disk does."""

        def write(self, data: bytes) -> int:
            return os.write(descriptor, data[:3])

        def fileno(self) -> int:
            return descriptor

        def truncate(self, size: int) -> None:
            os.ftruncate(descriptor, size)

    descriptor = file._file.fileno()
    with monkeypatch.context() as patch:
        patch.setattr(file, "_file", Full())
        file.write(lines(2))
        file.write(lines(3))
    file.write(lines(4))
    file.close()
    assert steps_in(path) == [1, 4]
    assert capsys.readouterr().err == f"pipetrain: {path} lacks lines from here on (No space left on device)\n"
