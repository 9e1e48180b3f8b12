"""What a run tells whoever keeps its figures, and how a keeper that fails is left behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipetrain.observe.metrics import StepMetrics
from pipetrain.observe.report import RunReport
from pipetrain.timeline.shown import Shown


@dataclass(frozen=True)
class Ending:
    """A run that has come to its end, or was stopped on request."""

    report: RunReport
    pictures: Sequence[Shown]  # the step as predicted, where it was, and the last one as measured
    page: str  # both as HTML


class Tracker:
    """Keeps the figures of a run somewhere. Every method may raise: the run goes on without it then."""

    def start(self, config: Mapping[str, Any]) -> None:
        """The run begins, or goes on; `config` is all that it was asked to do, as plain values."""

    def step(self, metrics: StepMetrics) -> None:
        """A step is over."""

    def evaluated(self, step: int, heldout_loss: float) -> None:
        """A held-out evaluation after `step`."""

    def rewind(self, first_step: int) -> None:
        """Training goes on from an older snapshot: steps from `first_step` on will be told again."""

    def finish(self, ending: Ending) -> None:
        """All steps are over. Not called where the run fails."""

    def close(self) -> None:
        """Writes what is still on its way. Called once, whatever happened before."""


class Trackers:
    """Several trackers by name. One that raises is named on stderr, once, and hears nothing more."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def start(self, config: Mapping[str, Any]) -> None:
        self._tell(lambda tracker: tracker.start(config))

    def step(self, metrics: StepMetrics) -> None:
        self._tell(lambda tracker: tracker.step(metrics))

    def evaluated(self, step: int, heldout_loss: float) -> None:
        self._tell(lambda tracker: tracker.evaluated(step, heldout_loss))

    def rewind(self, first_step: int) -> None:
        self._tell(lambda tracker: tracker.rewind(first_step))

    def finish(self, ending: Ending) -> None:
        self._tell(lambda tracker: tracker.finish(ending))

    def close(self) -> None:
        self._tell(lambda tracker: tracker.close())
        self._trackers.clear()

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a library of others raises: no tracker is worth a run
                del self._trackers[name]
                print(
                    f"pipetrain: {name} keeps nothing from here on ({first_line(error)}); the run goes on, and "
                    "metrics.jsonl has its steps",
                    file=sys.stderr,
                    flush=True,
                )
                with contextlib.suppress(Exception):
                    tracker.close()


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, flat: `mfu`, and `wait_gradient_seconds/rank-1` for those per rank."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, (list, tuple)):
            found |= {f"{key}/rank-{rank}": entry for rank, entry in enumerate(value) if entry is not None}
        elif value is not None and key != "step":
            found[key] = value
    return found


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
