"""events/rank-NNNN.jsonl: what each rank did, op by op, on its own clock."""

from __future__ import annotations

import json
from pathlib import Path

from pipetrain.observe.lines import LineFile
from pipetrain.schedule.events import OpEvent

FIRST_STEPS = 10  # written whole: this is where a run goes wrong or settles
SPREAD_STEPS = 100  # and about so many more over the rest of the run, so that a long run does not fill the disk


class EventFile:
    """A sink for the events of a rank. It holds those of one step and writes them when the step is over, away from the hot path."""

    def __init__(self, path: Path, rank: int, num_steps: int, first_step: int = 1) -> None:
        self._rank = rank
        self._file = LineFile(path, first_step)
        self._every = max(num_steps // SPREAD_STEPS, 1)
        self._events: list[OpEvent] = []

    def __call__(self, event: OpEvent) -> None:
        self._events.append(event)

    def end_step(self, step: int) -> None:
        """Writes the events of `step` (from 1), or drops them where the file has enough."""
        events, self._events = self._events, []
        if step <= FIRST_STEPS or step % self._every == 0:
            self._file.write(_line(step, self._rank, event) for event in events)

    def rewind(self, first_step: int) -> None:
        """Drops the events of `first_step` and later ones, and those of a step that has not ended."""
        self._events = []
        self._file.rewind(first_step)

    def close(self) -> None:
        self._file.close()


def _line(step: int, rank: int, event: OpEvent) -> str:
    record = {
        "step": step,
        "rank": rank,  # of the run, where the event counts those of a replica
        "lane": event.lane.value,
        "op": str(event.op),
        "start": event.start,
        "end": event.end,
    }
    return json.dumps(record) + "\n"
