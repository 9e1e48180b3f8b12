"""Two runs that start at the same moment never share a run folder."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from ranks import PATIENCE_SECONDS

from pipetrain.monitor import folder
from pipetrain.monitor.folder import choose_folder


@pytest.mark.slow
def test_two_runs_that_start_in_one_new_folder(tmp_path: pathlib.Path) -> None:
    """Symptom: two runs started in the same new `run_dir` at the same moment both ran, and wrote over each other.

    Cause: a folder was taken once `config.yaml` lay in it, which is written long after it was looked for.
    """
    (tmp_path / "text.txt").write_text("a stage waits for a stage that runs " * 500)
    options = ["experiment=smoke", "data=text", "data.path=text.txt", "pipeline.num_stages=1", "steps=2", "run_dir=new"]
    root = str(pathlib.Path(__file__).resolve().parents[2])
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pipetrain.train", *options],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = sorted((run.communicate(timeout=PATIENCE_SECONDS)[1], run.returncode) for run in runs)
    assert sorted(code for _, code in ends) == [0, 2], ends
    (told,) = (error for error, code in ends if code == 2)
    # Where one has ended before the other begins, that finds its configuration.
    assert "another run is in this folder" in told or "there is a run in this folder" in told


def test_two_runs_without_a_folder_that_start_in_one_second(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two runs without `run_dir` that started in the same second could share a folder.

    Cause: a free name was chosen first, and its folder made later.
    """
    monkeypatch.chdir(tmp_path)
    taken = choose_folder(None, "run").path
    names = iter([taken, taken, taken.with_name("next")])
    monkeypatch.setattr(folder, "choose_folder", lambda *_: folder.RunFolder(next(names)))
    assert folder.reserve_folder(None, "run").path == taken
    assert folder.reserve_folder(None, "run").path == taken.with_name("next")
