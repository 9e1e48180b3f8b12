"""Two runs that start at the same moment never share a run folder."""

from __future__ import annotations

import pathlib

import pytest

from pipetrain.monitor import folder
from pipetrain.monitor.folder import choose_folder


def test_two_runs_without_a_folder_that_start_in_one_second(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two runs without `run_dir` that started in the same second could share a folder.

    Cause: a free name was chosen first, and its folder made later. (With one `run_dir`: `test_a_folder_that_another_run_has_claimed`.)
    """
    monkeypatch.chdir(tmp_path)
    taken = choose_folder(None, "run").path
    names = iter([taken, taken, taken.with_name("next")])
    monkeypatch.setattr(folder, "choose_folder", lambda *_: folder.RunFolder(next(names)))
    assert folder.reserve_folder(None, "run").path == taken
    assert folder.reserve_folder(None, "run").path == taken.with_name("next")
