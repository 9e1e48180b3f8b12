"""What each file of rows needs."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_rows import Check, Row, answer, as_nobody

from pipetrain.launcher import launch


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter: pytest's own are for their owner."""
    path = Path(tempfile.mkdtemp(prefix="pipetrain-test-"))
    path.chmod(0o777)
    yield path
    path.chmod(0o777)
    for inside, folders, _ in os.walk(path):  # top-down: a row may have shut a folder
        for name in folders:
            (Path(inside) / name).chmod(0o777)
    shutil.rmtree(path)


@pytest.fixture
def check(
    folder: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Check:
    """Types a row: the answer is one line that helps; nothing was written and no process started."""

    def check(row: Row) -> None:
        if row.as_rank:  # it starts with what `trained` has left
            shutil.copytree(request.getfixturevalue("trained"), folder, dirs_exist_ok=True)
            capsys.readouterr()
        row.prepare(folder)
        was_empty = not row.as_nobody and not any(folder.iterdir())
        monkeypatch.chdir(folder)
        monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("processes were started"))
        with as_nobody() if row.as_nobody else contextlib.nullcontext():
            code = answer(row, folder)
        told = capsys.readouterr()
        assert code == row.code, told.err
        (line,) = told.err.splitlines()
        assert line.startswith("pipetrain: ")
        assert [word for word in row.says if word.replace("{}", str(folder)) not in line] == [], line
        assert "Traceback" not in told.err + told.out
        assert not (was_empty and any(folder.iterdir()))

    return check
