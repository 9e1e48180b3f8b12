"""`pipetrain bench`: the comparisons of `benchmarks/`, which have options of their own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

BENCH_HELP = "comparisons with other systems, measured on this machine"


def find_benchmarks() -> Path | None:
    """The folder of the benchmarks: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "benchmarks", package.parent / "benchmarks")
    return next((folder for folder in folders if (folder / "command.py").is_file()), None)


def run_benchmarks(folder: Path, words: Sequence[str]) -> int:
    """`pipetrain bench WORDS`; returns the exit code."""
    if folder.parent.name == "pipetrain":
        module = importlib.import_module("pipetrain.benchmarks.command")
    else:
        sys.path.insert(0, str(folder.parent))
        module = importlib.import_module("benchmarks.command")
    code: int = module.main(words)
    return code
