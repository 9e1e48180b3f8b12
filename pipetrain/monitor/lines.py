"""Files of JSON lines, one or more a step, that a run appends to for weeks: figures, and the ops of each rank."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipetrain.config.read_files import parse_json
from pipetrain.config.terminal import say
from pipetrain.config.write_files import open_to_append, replace_file
from pipetrain.monitor.shown import op_record
from pipetrain.schedule.events import OpEvent

FIRST_STEPS = 10  # of which all events are written: this is where a run goes wrong or settles
_MOST_LINE_BYTES = 2**24  # of 10,000 ranks a line of metrics has 1 MB
SPREAD_STEPS = 100  # and about so many more over the rest of the run, so that a long run does not fill the disk


class LineFile:
    """Appends lines at once, each whole or not at all. A full disk loses lines and does not end the run; the user is warned once.

    Lines of steps before `first_step` stay: a resumed run repeats the others.
    """

    def __init__(self, path: Path, first_step: int = 1) -> None:
        self._path = path
        self._failed = False
        _keep_before(path, first_step)
        self._file = open_to_append(path)

    def write(self, lines: Iterable[str]) -> None:
        """Appends `lines`, which end with a line break each."""
        data, size = "".join(lines).encode(), None
        try:
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(data) != len(data):
                raise OSError("No space left on device")
        except OSError as error:
            with contextlib.suppress(OSError):
                if size is not None:
                    self._file.truncate(size)  # no half of a line
            if not self._failed:
                self._failed = True
                reason = error.strerror or error
                say(f"{self._path} lacks lines from here on ({reason})")

    def rewind(self, first_step: int) -> None:
        """Drops the lines of `first_step` and later ones: they will be written again."""
        self.close()
        with contextlib.suppress(OSError):  # a full disk: the lines come twice
            _keep_before(self._path, first_step)
        self._file = open_to_append(self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _keep_before(path: Path, first_step: int) -> None:
    kept = (line for line in read_lines(path) if line["step"] < first_step) if first_step > 1 else ()
    replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of such a file that are whole and have a step, as objects; none where there is no file."""
    if path.is_file():
        with path.open("rb") as file:
            yield from _parsed(iter(lambda: file.readline(_MOST_LINE_BYTES), b""))


def spread_lines(path: Path, most: int) -> list[dict[str, Any]]:
    """Some `most` lines of such a file, evenly over it, the last one included, without reading all of it; likewise."""
    if not path.is_file():
        return []
    found = []
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        for at in (length * number // most for number in range(most)):
            file.seek(at)
            if at:
                file.readline()  # the rest of a line
            found.append(file.readline())
        file.seek(max(0, length - _MOST_LINE_BYTES))
        found += file.read().splitlines()[-2:]  # the very last may be half a line
    by_step = {line["step"]: line for line in _parsed(found)}
    return [by_step[step] for step in sorted(by_step)]


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line: a process was killed while it wrote
            value = parse_json(line)
            if isinstance(value, dict) and type(value.get("step")) is int:
                yield value


class EventFile:
    """A sink for the events of a rank, on its own clock: events/rank-NNNN.jsonl.

    It holds those of one step and writes them when the step is over, away from the hot path.
    """

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
            # The rank is that of the run, where an event counts those of a replica.
            records = ({"step": step, **op_record(event), "rank": self._rank} for event in events)
            self._file.write(json.dumps(record) + "\n" for record in records)

    def rewind(self, first_step: int) -> None:
        """Drops the events of `first_step` and later ones, and those of a step that has not ended."""
        self._events = []
        self._file.rewind(first_step)

    def close(self) -> None:
        self._file.close()
