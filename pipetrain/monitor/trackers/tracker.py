"""What a run tells whoever keeps its figures: metrics.jsonl, and what is asked for besides. One that fails is left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipetrain.config.records import ObserveConfig
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import LineFile
from pipetrain.monitor.metrics import StepMetrics
from pipetrain.monitor.report import RunReport
from pipetrain.monitor.shown import Shown


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

    def close(self) -> None:
        self.tell(lambda tracker: tracker.close())
        self._trackers.clear()

    def tell(self, call: Callable[[Tracker], None]) -> None:
        """Calls each, as in `tell(lambda tracker: tracker.step(metrics))`."""
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


class JsonLines(Tracker):
    """metrics.jsonl, a line for each step, and heldout.jsonl, a line for each evaluation on the way.

    Whole lines are appended at once: what a killed run has written stays. Lines of steps that are run again are dropped.
    """

    def __init__(self, folder: RunFolder, first_step: int = 1, *, evaluates: bool = False) -> None:
        files = (folder.metrics, folder.heldout) if evaluates else (folder.metrics,)
        self._files = [LineFile(file, first_step) for file in files]

    def step(self, metrics: StepMetrics) -> None:
        self._files[0].write([json.dumps(asdict(metrics)) + "\n"])

    def evaluated(self, step: int, heldout_loss: float) -> None:
        self._files[1].write([json.dumps({"step": step, "heldout_loss": heldout_loss}) + "\n"])

    def rewind(self, first_step: int) -> None:
        for file in self._files:
            file.rewind(first_step)

    def close(self) -> None:
        for file in self._files:
            file.close()


def check_trackers(config: ObserveConfig) -> None:
    """Raises:
    ValueError: a tracker is asked for whose package is not installed.
    """
    for key, value, is_off, package in (
        ("observe.wandb.mode", config.wandb.mode, "disabled", "wandb"),
        ("observe.tensorboard", str(config.tensorboard).lower(), "false", "tensorboard"),
    ):
        if value != is_off and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{key}={value}: the package {package} is not installed; pip install 'pipetrain[train]' brings it, "
                f"and {key}={is_off} does without"
            )


def make_trackers(config: ObserveConfig, folder: RunFolder, first_step: int) -> dict[str, Tracker]:
    """By the name that a message gives them. Files of steps that will be repeated lose those lines now."""
    evaluates = config.eval_every_steps is not None
    trackers: dict[str, Tracker] = {"metrics.jsonl": JsonLines(folder, first_step, evaluates=evaluates)}
    if config.wandb.mode != "disabled":
        from pipetrain.monitor.trackers.wandb import WandbTracker

        trackers["wandb"] = WandbTracker(folder, config.wandb, first_step)
    if config.tensorboard:
        from pipetrain.monitor.trackers.tensorboard import TensorBoardTracker

        trackers["tensorboard"] = TensorBoardTracker(folder, first_step)
    return trackers


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
