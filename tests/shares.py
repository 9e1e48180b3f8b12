"""What one run of CI tries of a long table: the rows of changed files, and of the others every n-th, in turn.

The turn is the number of commits before this one, so `n` commits in a row try all rows. `make test-full` and `make mutants`
try them all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")
ROOT = Path(__file__).resolve().parents[1]
# What is pushed at once was written within so many hours: CI sees one commit of it, the last.
PUSH_HOURS = 3
# Tests of clusters, of several machines and of the Docker image take minutes, so they wait for their turn. But they always run if they may
# be affected: if a file has changed whose path starts with a text on the right, tests whose path starts with the text on the left run.
RUN_IF_CHANGED = (
    ("tests/slurm/", ("pipetrain/launcher/", "launch/", "tests/slurm/")),
    ("tests/hosts/test_hosts", ("pipetrain/launcher/", "pipetrain/comm/address", "tests/hosts/")),
    ("tests/hosts/test_network", ("pipetrain/comm/address", "tests/hosts/")),
    ("tests/hosts/test_docker", ("docker/", "pyproject.toml", "constraints.txt")),
)
# Their tests start whole runs, which take minutes.
LONG = ("tests/bench/", "tests/hosts/", "tests/launch/", "tests/train/")


def in_turn(rows: Sequence[Row], num_turns: int, turn: int) -> list[Row]:
    """Every `num_turns`-th of the rows, from row `turn` on.

    Raises:
        ValueError: there are no such turns.
    """
    if num_turns < 1:
        raise ValueError(f"{num_turns} turns are none; 1 tries all rows at once, 8 an eighth per commit")
    return list(rows[turn % num_turns :: num_turns])


def long_first(paths: Sequence[str], num_workers: int) -> list[list[int]]:
    """A part of some slow tests for each worker, as indices of `paths`, the files that they are in: those of whole runs (LONG) first.

    xdist cuts its list into parts of one length, one per worker, and an idle worker takes from the end of another's part. So each part begins
    with long tests, and short ones are left to fill the end of the run. Tests of one long file stay together: they share runs.
    """
    files = list(dict.fromkeys(path for path in paths if path.startswith(LONG)))
    short = [index for index, path in enumerate(paths) if not path.startswith(LONG)]
    parts: list[list[int]] = []
    for worker in range(num_workers):
        theirs = set(files[worker::num_workers])
        part = [index for index, path in enumerate(paths) if path in theirs]
        end = len(paths) * (worker + 1) // num_workers - sum(map(len, parts))
        part += [short.pop(0) for _ in range(min(max(end - len(part), 0), len(short)))]
        parts.append(part)
    parts[-1] += short
    return parts


def always_runs(path: str, changed: Set[str]) -> bool:
    """Whether slow tests in the file `path` run whatever the turn, because files in `changed` affect them: see RUN_IF_CHANGED."""
    starts = [start for tests, affecting in RUN_IF_CHANGED if path.startswith(tests) for start in affecting]
    return any(file.startswith(tuple(starts)) for file in changed)


def this_turn() -> int:
    """How many commits lead to this one."""
    return int(_git("rev-list", "--count", "HEAD"))


def changed_files() -> frozenset[str]:
    """Paths that HEAD, or a commit that was pushed with it, has changed, and those that are not committed yet."""
    newest = int(_git("log", "-1", "--format=%ct"))
    before = _git("rev-list", "-1", f"--before={newest - PUSH_HOURS * 3600}", "HEAD")
    if not before:  # the whole history is younger: nothing to compare with
        return frozenset()
    return frozenset(_git("diff", "--name-only", before).splitlines())


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
