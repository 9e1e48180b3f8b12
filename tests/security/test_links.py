"""Nothing is written through a link that somebody has put where we lock, log or write; what it leads to stays as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import PIPETRAIN, complete
from foreign import REPORT

from pipetrain.config.write_files import draft_beside, open_to_append, user_cache
from pipetrain.data.corpus import cache_root
from pipetrain.data.tokenizing import made_once
from pipetrain.models.weights import SINGLE, write_index, write_shard
from pipetrain.monitor.claim import LOCK, check_unclaimed, claimed
from pipetrain.monitor.lines import LineFile
from pipetrain.monitor.report import write_report

WRITERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda path: LineFile(path, 3).close(),
    "report.json": lambda path: write_report(path, REPORT),
    SINGLE: lambda path: write_shard(path, {"w": torch.ones(1)}),
    "model.safetensors.index.json": lambda path: write_index(path.parent, []),
}


def victim_of(link: Path) -> Path:
    victim = link.parent / "victim"
    victim.write_text("dear")
    link.symlink_to(victim)
    return victim


def test_the_lock_of_a_run_folder(tmp_path: Path) -> None:
    victim = victim_of(tmp_path / LOCK)
    with pytest.raises(ValueError, match=r"run\.lock cannot be opened there \(Too many levels of symbolic links\)"):
        check_unclaimed(str(tmp_path), again=False)
    with pytest.raises(ValueError, match="run_dir="), claimed(tmp_path, again=False):
        pass
    assert victim.read_text() == "dear"


def test_the_lock_of_a_folder_of_tokens(tmp_path: Path) -> None:
    victim = victim_of(tmp_path / "tokens.lock")
    with pytest.raises(ValueError, match=r"tokens cannot be kept there \(Too many levels of symbolic links"):
        made_once(tmp_path / "tokens", lambda draft: None, timeout_seconds=1.0)
    assert victim.read_text() == "dear"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ["{}", ".{}.draft", "{}.draft"])
def test_a_file_of_a_run_replaces_a_link(name: str, place: str, tmp_path: Path) -> None:
    victim = victim_of(tmp_path / place.format(name))
    WRITERS[name](tmp_path / name)
    assert victim.read_text() == "dear"
    assert (tmp_path / name).is_file()
    assert not (tmp_path / name).is_symlink()


def test_a_draft_that_leads_into_a_folder_leaves_the_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "dear").touch()
    (tmp_path / ".a.draft").symlink_to(kept)
    with draft_beside(tmp_path / "a") as draft:
        assert draft.parent.stat().st_mode & 0o777 == 0o700
        draft.write_text("whole")
    assert (tmp_path / "a").read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == ["a", "kept"]
    assert os.listdir(kept) == ["dear"]


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")

    def fail() -> None:
        with draft_beside(tmp_path / "a") as draft:
            draft.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (tmp_path / "a").read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]


def test_a_log_is_a_file(tmp_path: Path) -> None:
    victim = victim_of(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("link", "symbolic links"), ("pipe", "no regular file")):
        with pytest.raises(OSError, match=reason):
            open_to_append(tmp_path / name)
    assert victim.read_text() == "dear"
    for words in (b"one ", b"two"):
        with open_to_append(tmp_path / "log") as file:
            file.write(words)
    assert (tmp_path / "log").read_text() == "one two"


@pytest.mark.slow
def test_a_run_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    """Every file that a run leaves is a link out of the folder when the same run begins in another one."""
    words = [*PIPETRAIN, "experiment=smoke", "steps=2", "snapshot.every_steps=2", "observe.progress=false"]
    first, second, outside = (tmp_path / name for name in ("first", "second", "outside"))
    done = complete(tmp_path, [*words, f"run_dir={first}"])
    assert done.returncode == 0, done.stderr
    outside.mkdir()
    for path in first.rglob("*"):
        where = second / path.relative_to(first)
        if path.is_dir():
            where.mkdir(parents=True)
        else:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.symlink_to(outside / path.name)
    done = complete(tmp_path, [*words, f"run_dir={second}"])
    assert done.returncode == 0, done.stderr
    assert not list(outside.iterdir())
    assert not [path for path in second.rglob("*") if path.is_symlink()]


# Caches ---------------------------------------------------------------------------------------------------------------


def test_the_cache_is_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert user_cache("orders") == tmp_path / "new/pipetrain/orders"
    assert (tmp_path / "new/pipetrain").stat().st_mode & 0o777 == 0o700
    (tmp_path / "new/pipetrain").chmod(0o755)  # an older version made it
    assert cache_root(None) == tmp_path / "new/pipetrain/tokens"
    assert (tmp_path / "new/pipetrain").stat().st_mode & 0o777 == 0o700
    if (owner := (tmp_path / "new").stat().st_uid) != 0:  # what root made is believed
        with monkeypatch.context() as another_user:
            another_user.setattr("os.geteuid", lambda: owner + 1)
            with pytest.raises(ValueError, match=rf"belongs to user {owner}; set XDG_CACHE_HOME"):
                user_cache("orders")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("orders") == tmp_path / ".cache/pipetrain/orders"


def test_a_named_cache_is_not_for_everybody(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for mode in (0o700, 0o2775):
        folder.chmod(mode)
        assert cache_root(str(folder)) == folder
        assert folder.stat().st_mode & 0o7777 == mode
    folder.chmod(0o1777)
    with pytest.raises(ValueError, match=rf"data\.cache_dir={folder}: everybody may write .* chmod o-w {folder}"):
        cache_root(str(folder))
