"""What a benchmark gives: tables for people, targets that hold or do not, notes, and everything measured as JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipetrain.monitor.draw.table import Table as Columns


@dataclass(frozen=True)
class Options:
    """The command line. `quick`: few rounds and the smallest case, to see that it runs; its figures prove nothing."""

    rounds: int = 3
    quick: bool = False
    out: Path = Path("bench-results")


@dataclass(frozen=True)
class Table:
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_text(self) -> str:
        """The title above columns in line; the first to the left, numbers to the right."""
        return f"{self.title}\n\n{Columns(self.headers, self.rows).as_text(ruled=True)}"


@dataclass(frozen=True)
class Target:
    """A promise and what was measured: `value` must be at most `limit`."""

    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{'holds ' if self.met else 'MISSED'}  {self.what}: {self.value:.3f}, promised at most {self.limit:g}"


@dataclass
class Result:
    """One benchmark's outcome. `draw(path)` draws it into a file whose ending says the format."""

    name: str
    claim: str
    settings: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Path], None] | None = None

    def as_text(self) -> str:
        parts = [f"{self.name}: {self.claim}", *(table.as_text() for table in self.tables)]
        if self.targets:
            parts.append("\n".join(map(str, self.targets)))
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "format_version": 1,
            "benchmark": self.name,
            "claim": self.claim,
            **surroundings(),
            "settings": self.settings,
            "targets": [{**vars(target), "met": target.met} for target in self.targets],
            "notes": self.notes,
            "tables": [vars(table) for table in self.tables],
            "measured": self.data,
        }

    def write(self, folder: Path) -> list[Path]:
        """`NAME.json`, and `NAME.svg` and `.png` where matplotlib is installed; returns what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / f"{self.name}.json"]
        written[0].write_text(json.dumps(self.as_json(), indent=1) + "\n")
        if self.draw is not None:
            try:
                importlib.metadata.version("matplotlib")
            except importlib.metadata.PackageNotFoundError:
                self.notes.append("no plot: matplotlib is missing: pip install 'pipetrain[bench]'")
                return written
            for ending in ("svg", "png"):
                path = folder / f"{self.name}.{ending}"
                self.draw(path)
                written.append(path)
        return written


def surroundings() -> dict[str, Any]:
    """When, on what, and with which versions."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "pipetrain"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions,
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "gpu": _gpu_name(),
            "system": platform.platform(),
            "nice": os.nice(0),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
    }


def _gpu_name() -> str | None:
    torch = importlib.import_module("torch")
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({platform.machine()})"
