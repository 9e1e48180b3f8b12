"""metrics.jsonl: a line for each step, readable while the run goes on."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

PerRank = tuple[float, ...]


@dataclass(frozen=True)
class StepMetrics:
    """One step. None: does not apply. Tuples: a number per rank, in rank order. Seconds, bytes."""

    step: int  # from 1
    loss: float  # nats per token
    lr: float
    grad_norm: float | None  # before clipping
    tokens_per_second: float  # of the whole step, with the optimizer and everything else
    step_seconds: float  # from the start of the first op to the end of the last one on any rank
    bubble_fraction: float
    mfu: float | None
    recompute_hidden_seconds: PerRank
    recompute_exposed_seconds: PerRank
    wait_activation_seconds: PerRank
    wait_gradient_seconds: PerRank
    peak_activation_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int | None, ...]


def keep_before(path: Path, first_step: int) -> None:
    """Leave in a file of lines the steps before `first_step`: a run that goes on from a snapshot repeats the others.

    The last line may be half of one: its process was killed.
    """
    kept = []
    if first_step > 1 and path.is_file():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] < first_step:
                    kept.append(line + "\n")
    draft = path.with_suffix(".draft")
    draft.write_text("".join(kept))
    draft.replace(path)


class MetricsFile:
    """Appends a line per step; a reader never sees half a line of a step before the last."""

    def __init__(self, path: Path, first_step: int = 1) -> None:
        keep_before(path, first_step)
        self._file = path.open("a", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(asdict(metrics)) + "\n")

    def close(self) -> None:
        self._file.close()
