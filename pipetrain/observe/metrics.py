"""metrics.jsonl: a line for each step, readable while the run goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetrain.observe.lines import LineFile

PerRank = tuple[float, ...]


@dataclass(frozen=True)
class StepMetrics:
    """One step. None: does not apply. Tuples: a number per rank, in rank order. Seconds, bytes."""

    step: int  # from 1
    loss: float | None  # nats per token; None: not finite
    lr: float
    grad_norm: float | None  # before clipping; None: not finite, or not known
    tokens_per_second: float  # of the whole step, with the optimizer and everything else
    step_seconds: float  # from the start of the first op to the end of the last one on any rank
    bubble_fraction: float
    mfu: float | None
    recompute_hidden_seconds: PerRank
    recompute_exposed_seconds: PerRank
    wait_activation_seconds: PerRank
    wait_gradient_seconds: PerRank
    fill_seconds: PerRank
    drain_seconds: PerRank
    imbalance_seconds: PerRank
    unexplained_seconds: PerRank
    peak_activation_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int | None, ...]
    skipped: bool = False  # whether the step was left out: the weights did not change


class MetricsFile:
    """Appends a line per step; a reader never sees half a line."""

    def __init__(self, path: Path, first_step: int = 1) -> None:
        self._file = LineFile(path, first_step)

    def write(self, metrics: StepMetrics) -> None:
        self._file.write([json.dumps(asdict(metrics)) + "\n"])

    def rewind(self, first_step: int) -> None:
        """Drops the lines of `first_step` and later ones."""
        self._file.rewind(first_step)

    def close(self) -> None:
        self._file.close()
