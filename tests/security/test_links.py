"""A lock file that somebody has made a link empties no file that it leads to."""

from __future__ import annotations

import pathlib

import pytest

from pipetrain.data.tokenizing import made_once
from pipetrain.monitor.claim import LOCK, check_unclaimed, claimed


def victim_of(link: pathlib.Path) -> pathlib.Path:
    victim = link.parent / "victim"
    victim.write_text("dear")
    link.symlink_to(victim)
    return victim


def test_the_lock_of_a_run_folder(tmp_path: pathlib.Path) -> None:
    victim = victim_of(tmp_path / LOCK)
    with pytest.raises(ValueError, match=r"run\.lock cannot be opened there \(Too many levels of symbolic links\)"):
        check_unclaimed(str(tmp_path), again=False)
    with pytest.raises(ValueError, match="run_dir="), claimed(tmp_path, again=False):
        pass
    assert victim.read_text() == "dear"


def test_the_lock_of_a_folder_of_tokens(tmp_path: pathlib.Path) -> None:
    victim = victim_of(tmp_path / "tokens.lock")
    with pytest.raises(ValueError, match=r"tokens cannot be kept there \(Too many levels of symbolic links"):
        made_once(tmp_path / "tokens", lambda draft: None, timeout_seconds=1.0)
    assert victim.read_text() == "dear"
