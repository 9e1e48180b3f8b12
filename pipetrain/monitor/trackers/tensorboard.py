"""TensorBoard: event files in the run folder's tensorboard/, for `tensorboard --logdir runs`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipetrain.monitor.draw.terminal import staircase
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.metrics import StepMetrics
from pipetrain.monitor.trackers.tracker import Ending, Tracker, figures

_WIDTH = 120  # columns of the timeline


class TensorBoardTracker(Tracker):
    """Writes with the `tensorboard` package itself: the writers of torch and of tensorboardX would load torch here.

    Each step is on the disk before the next. A run that goes on tells the readers to forget the steps that it repeats.
    """

    def __init__(self, folder: RunFolder, first_step: int = 1) -> None:
        self._folder = folder
        self._first_step = first_step
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:  # noqa: ARG002 (there is no place for it in an event file)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder.tensorboard))
        self.rewind(self._first_step)

    def step(self, metrics: StepMetrics) -> None:
        self._scalars(metrics.step, figures(asdict(metrics)))

    def evaluated(self, step: int, heldout_loss: float) -> None:
        self._scalars(step, {"heldout_loss": heldout_loss})

    def rewind(self, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def finish(self, ending: Ending) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        report = ending.report
        if report.heldout_loss is not None:
            self._scalars(report.steps, {"heldout_loss": report.heldout_loss})
        drawn = [f"{one.title}\n\n{staircase(one.timeline, width=_WIDTH)}" for one in ending.pictures]
        text = "\n\n".join(["```", *drawn, "```"])  # markdown: as it stands
        self._write(report.steps, summary=text_pb("timeline", text))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=Summary(value=entries))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **content))
        self._writer.flush()
