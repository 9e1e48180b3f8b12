"""The names inside `snapshots/`, and how they reach the disk.

    step-00000200/                   a whole snapshot, after 200 steps
    step-00000200.partial-1f3a09c2/  one that is being written, or was when its process died
    step-00000200.damaged/           one whose manifest does not hold, set aside by a resume

Only a rename makes the first from the second, so a whole name never stands for half a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any


class Part(StrEnum):
    """The sub-folders of a snapshot; each holds a safetensors file per rank."""

    WEIGHTS = "weights"  # `3.mlp.weight`: parameters and buffers
    OPTIMIZER = "optimizer"  # `3.mlp.weight/exp_avg`: the optimizer's state of a parameter
    GENERATORS = "generators"  # `cpu`, `cuda`: torch's default generators; `python`, `numpy`: theirs, as JSON in bytes
    OPTIONS = "options"  # `3.mlp.weight`: those of its group, as JSON in bytes; of a loop of the user's own alone


ALWAYS = (Part.WEIGHTS, Part.OPTIMIZER, Part.GENERATORS)  # in every snapshot, if with no tensors


STATE = "state.json"
FOLDER_MODE = 0o750  # the owner writes, the group reads, others have no business here
FILE_MODE = 0o640
_WHOLE = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(partial|removed)-[0-9a-f]+")


def path_of(folder: Path, step: int) -> Path:
    """Where the whole snapshot after `step` steps lies."""
    return folder / f"step-{step:08d}"


def rank_path(part: Part, rank: int) -> str:
    """The file of one rank, relative to the snapshot's folder."""
    return f"{part}/rank-{rank:04d}.safetensors"


def draft_path(folder: Path, step: int, token: int) -> Path:
    """Where it is written. The token keeps two attempts apart."""
    return folder / f"step-{step:08d}.partial-{token:08x}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the snapshots in `folder`, newest first; whether they are whole is for their manifests to say."""
    if not folder.is_dir():
        return []
    return sorted(
        (int(match[1]) for entry in folder.iterdir() if (match := _WHOLE.fullmatch(entry.name))), reverse=True
    )


def publish(draft: Path, target: Path) -> None:
    """Give a draft its whole name. What had that name (a damaged snapshot, or an older run's) is removed."""
    sync(draft)
    if target.exists():
        _remove(target)
    draft.rename(target)
    sync(target.parent)


def prune(folder: Path, step: int, keep_last: int | None, keep_multiples_of: int | None = None) -> None:
    """Keep the newest `keep_last` snapshots up to `step` (None: all), and those whose step is a multiple of `keep_multiples_of`."""
    if keep_last is None:
        return
    for old in [other for other in steps_in(folder) if other <= step][keep_last:]:
        if keep_multiples_of is None or old % keep_multiples_of:
            _remove(path_of(folder, old))


def remove_left_overs(folder: Path) -> None:
    """Remove what processes that died have left half written or half removed."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def _remove(snapshot: Path) -> None:
    # Renamed first: a process that dies while it removes must not leave a whole name on half a snapshot.
    doomed = snapshot.with_name(f"{snapshot.name}.removed-{os.getpid():08x}")
    snapshot.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_durable_json(path: Path, value: Mapping[str, Any]) -> None:
    """A new file with `value`, which others cannot write; on the disk when this returns."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        file.write(canonical_json(value))
        file.flush()
        os.fsync(file.fileno())


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The one spelling of `value`, so that each byte of a file counts."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sync_lines(run: Path) -> None:
    """The lines that a run has written about its steps, on the disk where it can: a resume writes none of those before its snapshot."""
    for path in (*run.glob("*.jsonl"), run):
        with contextlib.suppress(OSError):
            sync(path)


def sync(path: Path) -> None:
    """What a file holds, or the names in a folder, on the disk. Without it a rename may be lost with the machine's power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
