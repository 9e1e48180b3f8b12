"""metrics.jsonl: a line for each step, readable while the run goes on; heldout.jsonl: a line for each evaluation on the way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipetrain.observe.folder import RunFolder
from pipetrain.observe.lines import LineFile
from pipetrain.observe.metrics import StepMetrics
from pipetrain.observe.trackers.tracker import Tracker


class JsonLines(Tracker):
    """Appends whole lines at once: what a killed run has written stays. Lines of steps that are run again are dropped."""

    def __init__(self, folder: RunFolder, first_step: int = 1, *, evaluates: bool = False) -> None:
        self._metrics = LineFile(folder.metrics, first_step)
        self._heldout = LineFile(folder.heldout, first_step) if evaluates else None

    def step(self, metrics: StepMetrics) -> None:
        self._metrics.write([json.dumps(asdict(metrics)) + "\n"])

    def evaluated(self, step: int, heldout_loss: float) -> None:
        if self._heldout is not None:
            self._heldout.write([json.dumps({"step": step, "heldout_loss": heldout_loss}) + "\n"])

    def rewind(self, first_step: int) -> None:
        self._metrics.rewind(first_step)
        if self._heldout is not None:
            self._heldout.rewind(first_step)

    def close(self) -> None:
        self._metrics.close()
        if self._heldout is not None:
            self._heldout.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of such a file, as far as they are whole; none where there is no file."""
    if path.is_file():
        with path.open() as file:
            for line in file:
                with contextlib.suppress(ValueError):  # half a line: a process was killed while it wrote
                    yield json.loads(line)
