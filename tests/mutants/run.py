"""Breaks one line at a time and asks the tests to notice: `python -m tests.mutants [--turns=8] [part of a name ...]`.

Each mutant is applied to a copy of the tree in a temporary folder, where only the tests that should turn red are run. It
fails if one survives, or if the line that it breaks is no longer there. With `--turns=8` those of changed files are tried and an eighth
of the others, in turn; of the rest, that their lines are there. The verdict says in which circle a test turns red.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from shares import changed_files, in_turn, this_turn

from mutants.mutant import Mutant
from mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
NUM_AT_ONCE = min(4, os.cpu_count() or 1)
# Where a mutant is looked for, the quickest first: marks of the tests, and seconds after which they hang.
CIRCLES = {"make test": ("not slow", 120), "make test-slow": ("slow", 600)}
NOT_BEGUN = "not begun"
_CONTEXT = mp.get_context("forkserver")
# Modules that most tests load, which takes longer than most of them.
_LOADED = ["torch", "torch._dynamo", "pytest", "hypothesis.strategies", "hydra.utils"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Breaks one line at a time and asks the tests to notice.")
    parser.add_argument(
        "--turns", type=int, default=1, help="those of changed files, and of the others every so many-th, in turn"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after so many, no more of changed files are begun"
    )
    parser.add_argument("words", nargs="*", help="parts of the names of those to try")
    wanted = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not wanted.words or any(word in mutant.name for word in wanted.words)]
    survivors = [mutant.name for mutant in chosen if not applies(ROOT, mutant)]
    chosen, changed = of_this_turn(chosen, wanted.turns) if wanted.turns > 1 else (chosen, [])
    deadline = time.monotonic() + wanted.seconds
    # Of the server that all tests are forked from.
    os.environ.update(
        OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PATIENCE_SECONDS="40", LEFT_OVER_PATIENCE_SECONDS="5"
    )
    _CONTEXT.set_forkserver_preload(_LOADED)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        os.environ["TMPDIR"] = folder  # what tests leave goes with the copies
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(NUM_AT_ONCE):
            copy = Path(folder) / f"tree-{number}"
            shutil.copytree(
                ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
            )
            copies.put(copy)
        noticed: Counter[str] = Counter()
        in_time = [*chosen, *changed]
        tried = threads.map(partial(in_a_copy, copies, deadline, set(chosen)), in_time)
        for mutant, (seconds, verdict) in zip(in_time, tried):
            if verdict == NOT_BEGUN:
                continue
            chosen += [mutant] if mutant in changed else []
            if not verdict.startswith("red") and mutant.name not in survivors:
                survivors.append(mutant.name)
            noticed.update(circle for circle in CIRCLES if verdict.startswith(f"red in {circle}:"))
            print(f"{mutant.name:<52} {seconds:5.1f} s  {verdict}", flush=True)
    if late := [mutant for mutant in changed if mutant not in chosen]:
        print(f"{len(late)} of changed files not begun in {wanted.seconds:g} s; `make mutants` tries all")
    print(", ".join(f"{number} noticed by {circle}" for circle, number in noticed.items()))
    print(
        f"{sum(mutant.name not in survivors for mutant in chosen)} of {len(chosen)} turn a test red"
        + "".join(f"\n  not: {n}" for n in survivors)
    )
    return 1 if survivors or not chosen else 0


def of_this_turn(mutants: list[Mutant], num_turns: int) -> tuple[list[Mutant], list[Mutant]]:
    """Those whose turn it is, and of the others those of changed files, of the package or of tests."""
    due, changed = in_turn(mutants, num_turns, this_turn()), changed_files()
    others = [mutant for mutant in mutants if mutant not in due]
    return due, [one for one in others if changed & {one.file, *(test.split("::")[0] for test in one.tests)}]


def applies(tree: Path, mutant: Mutant) -> bool:
    return (tree / mutant.file).read_text().count(mutant.old) == 1


def in_a_copy(copies: SimpleQueue[Path], deadline: float, due: set[Mutant], mutant: Mutant) -> tuple[float, str]:
    """Seconds that it took, and the verdict: NOT_BEGUN past the deadline, if it is not due."""
    if mutant not in due and time.monotonic() > deadline:
        return 0.0, NOT_BEGUN
    copy = copies.get()
    try:
        start = time.monotonic()
        verdict = try_one(copy, mutant)
        return time.monotonic() - start, verdict
    finally:
        copies.put(copy)


def try_one(tree: Path, mutant: Mutant) -> str:
    """What happened to one mutant: `red` with the test that noticed, or why it counts as a failure."""
    path = tree / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return f"DOES NOT APPLY: the text stands {original.count(mutant.old)} times in {mutant.file}"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        verdicts = []
        for circle, (marks, seconds) in CIRCLES.items():
            verdicts.append(verdict_of(tree, ("-m", marks, *mutant.tests), seconds))
            if verdicts[-1].startswith("red"):
                return f"red in {circle}:{verdicts[-1].removeprefix('red').removeprefix(':')}"
        return next((verdict for verdict in verdicts if verdict == "SURVIVED"), verdicts[0])
    finally:
        path.write_text(original)


def verdict_of(tree: Path, tests: tuple[str, ...], seconds: float) -> str:
    said = tree / "said.txt"
    process = _CONTEXT.Process(target=run_tests, args=(tree, tests, said))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.kill()  # where it had not come so far as to have a group
        process.join()
        return f"red (nothing after {seconds} s)"
    lines = said.read_text(errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), None)
    if process.exitcode == 1 and failed:
        return "red: " + failed.removeprefix("FAILED ").split(" - ")[0]
    return "SURVIVED" if process.exitcode == 0 else f"NO TEST RAN (pytest {process.exitcode}): {' '.join(lines)[-300:]}"


def run_tests(tree: Path, tests: tuple[str, ...], said: Path) -> None:
    """In a process of its own, forked where `_LOADED` is loaded already: pytest in `tree`."""
    os.setsid()
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    # As `python -m pytest` in the tree has it: without this file's folder, which is the one of the tree that nobody has broken.
    sys.path[:] = [str(tree), *(path for path in sys.path if not Path(path).is_relative_to(ROOT / "tests"))]
    pytest = importlib.import_module("pytest")
    # Of a plugin that is loaded already, pytest says that it cannot rewrite its assertions.
    loaded = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-W", loaded, *tests])
    sys.stdout.flush()
    os._exit(code)
