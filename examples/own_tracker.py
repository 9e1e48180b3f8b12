"""A tracker of your own: `pipetrain train "observe.trackers=[examples.own_tracker:Losses]"` writes losses.csv into the run folder.

A package gives it a name with an entry point of `pipetrain.trackers`. Rank 0 makes it. If a method raises, the run goes on without it.
"""

from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.step_report import StepMetrics
from pipetrain.monitor.trackers import Tracker


class Losses(Tracker):
    """A line for each step; a resumed run replaces those that it repeats."""

    def __init__(self, folder: RunFolder, first_step: int) -> None:
        self._file = folder.path / "losses.csv"
        self._file.touch()
        self.rewind(first_step)

    def rewind(self, first_step: int) -> None:
        lines = self._file.read_text().splitlines(keepends=True)
        self._file.write_text("".join(line for line in lines if int(line.split(",")[0]) < first_step))

    def step(self, metrics: StepMetrics) -> None:
        with self._file.open("a") as file:
            file.write(f"{metrics.step},{metrics.loss}\n")
