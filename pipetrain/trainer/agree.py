"""What the ranks of a run agree on before its first step: what rank 0 chooses, that they read the same text, and one run folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipetrain.comm.group import Group, made_by_first
from pipetrain.monitor.claim import claimed
from pipetrain.monitor.folder import RunFolder, check_free, reserve_folder

_SHARED_SECONDS = 30.0  # network file systems may show a new file that late


def check_all_read_the_same(fingerprint: str, group: Group) -> None:
    """Each rank reads for itself: on several machines, inputs and targets might be of different text.

    Raises ValueError: on every rank.
    """
    if group.largest(int(group.from_first(fingerprint) != fingerprint)):
        raise ValueError(
            "the ranks do not read the same text (its SHA-256 differs): every machine needs the same files under data.path, or, "
            "with data=stdlib, the same Python"
        )


@contextlib.contextmanager
def agreed_folder(
    run_dir: str | None, experiment: str, group: Group, *, again: bool, announce: Callable[[str], None]
) -> Iterator[RunFolder]:
    """Rank 0 chooses, makes and claims the folder, and announces its path; the others are told, also what went wrong.

    It is claimed until the block ends. `again`: a run may have been in it, which goes on.

    Raises ValueError: it cannot be made, another run has it, or not every machine sees it; on every rank.
    """
    with contextlib.ExitStack() as stack:

        def choose() -> str:
            if not again:
                check_free(run_dir)
            folder = reserve_folder(run_dir, experiment)
            stack.enter_context(claimed(folder.path, again=again))
            folder.create(again=again)  # which looks once more: a run may have come and gone before the claim
            announce(str(folder.path))
            return str(folder.path)

        chosen = made_by_first(choose, group)
        if group.size > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            check_shared(Path(chosen), group)
        yield RunFolder(Path(chosen))


def check_shared(run_dir: Path, group: Group, timeout_seconds: float = _SHARED_SECONDS) -> None:
    """Ranks of several machines write into one run folder, and resume from its snapshots.

    Raises ValueError: a machine does not see the folder of the first within `timeout_seconds`; on every rank.
    """
    mark = f".seen-from-all-machines-{group.from_first(secrets.token_hex(4))}"
    if group.rank == 0:
        (run_dir / mark).touch()
    try:
        deadline = time.monotonic() + timeout_seconds
        while not (seen := (run_dir / mark).is_file()) and time.monotonic() < deadline:
            time.sleep(0.1)
        first_blind = group.largest(0 if seen else group.size - group.rank)
    finally:
        if group.rank == 0:
            (run_dir / mark).unlink()
    if first_blind:
        raise ValueError(
            f"run_dir={run_dir}: the machine of rank {group.size - first_blind} does not see this folder of the first "
            "machine; choose a folder on a file system that all machines share"
        )
