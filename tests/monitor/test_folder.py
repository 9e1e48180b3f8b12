"""The run folder: chosen once, never overwritten, found again."""

import os
import stat
from pathlib import Path

import pytest

from pipetrain.monitor.folder import RunFolder, check_free, choose_folder, find_folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_two_runs_of_one_second_have_two_folders() -> None:
    first = choose_folder(None, "quickstart")
    first.create()
    second = choose_folder(None, "quickstart")
    assert first.path != second.path
    assert first.path.name.endswith("-quickstart")
    assert first.path.parent.parent == Path("runs").resolve()


def test_latest_points_to_the_newest_and_is_relative() -> None:
    for _ in range(2):
        folder = choose_folder(None, "quickstart")
        folder.create()
        folder.config.write_text("steps: 1")
        link = Path("runs/latest")
        assert link.resolve() == folder.path
        assert not os.path.isabs(link.readlink())
        assert find_folder("latest") == folder
    assert sorted(entry.name[0] for entry in Path("runs").iterdir()) == ["2", "l"]  # no drafts left


def test_a_folder_elsewhere_is_not_the_latest_and_others_may_not_look_in() -> None:
    folder = choose_folder("elsewhere", "quickstart")
    folder.create()
    assert folder.path == Path("elsewhere").resolve()
    assert not Path("runs").exists()
    for path in (folder.path, folder.path / "events", folder.path / "weights"):
        assert stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXO | stat.S_IWGRP) == 0


def test_a_run_is_not_overwritten() -> None:
    folder = RunFolder(Path("mine").resolve())
    folder.create()
    folder.config.write_text("steps: 1")
    with pytest.raises(ValueError, match="there is a run in this folder"):
        check_free("mine")
    with pytest.raises(ValueError, match="run_dir"):
        folder.create()
    Path("file").write_text("")
    with pytest.raises(ValueError, match="this is a file"):
        check_free("file")
    check_free("new")
    check_free(None)


def test_a_run_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="train first"):
        find_folder("latest")
    with pytest.raises(ValueError, match="run folder:"):
        find_folder("runs/nothing")
