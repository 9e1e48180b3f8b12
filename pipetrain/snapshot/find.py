"""Which snapshot to go on from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from pipetrain.snapshot.files import path_of, steps_in
from pipetrain.snapshot.manifest import NAME, SnapshotDamaged, check_whole

SNAPSHOTS = "snapshots"  # the folder of a run folder that holds them


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest snapshot in `folder` that is as it was written; None where there are none at all.

    Damaged ones are set aside under another name, so that they do not count as kept, and the user is told.

    Raises:
        SnapshotDamaged: all are damaged. A fresh start would hide that a run was lost, so the user has to ask for one.
    """
    damaged: list[SnapshotDamaged] = []
    for step in steps_in(folder):
        snapshot = path_of(folder, step)
        try:
            check_whole(snapshot)
        except SnapshotDamaged as error:
            damaged.append(error)
            continue
        for problem in damaged:
            say(f"{problem}: that snapshot is set aside, going on from {snapshot.name}")
        for newer in steps_in(folder)[: len(damaged)]:
            with contextlib.suppress(OSError):  # on a disk that is read-only it stays, and is found damaged again
                (aside := path_of(folder, newer)).rename(aside.with_name(f"{aside.name}.damaged"))
        return snapshot
    if damaged:
        raise SnapshotDamaged(
            f"{damaged[0]}, and no snapshot in {folder} is whole: remove them to start from step 1, or choose another run_dir"
        )
    return None


def find(path: Path, say: Callable[[str], None]) -> Path:
    """The snapshot that a user names: its folder, a `snapshots` folder, or a run folder (then the newest whole one).

    Raises:
        ValueError: there is none.
        SnapshotDamaged: it is damaged.
    """
    if (path / NAME).exists() or path.name.startswith("step-"):
        check_whole(path)
        return path
    for folder in (path / SNAPSHOTS, path):
        snapshot = newest_whole(folder, say)
        if snapshot is not None:
            return snapshot
    raise ValueError(
        f"{path}: there is no snapshot; name a folder such as runs/latest/{SNAPSHOTS}/step-00000200, or a run folder"
    )
