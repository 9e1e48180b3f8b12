"""A timeline as text: a row per rank, a column per slice of time.

rank 0 F0F1F2........B0==B1==B2==
rank 1 ..F0F1F2....B0==B1==B2==
rank 2 ....F0B0==F1B1==F2B2==
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pipetrain.monitor.draw.palette import Looks, drawn_kinds, looks_of
from pipetrain.schedule.events import OpEvent, Timeline, ran_beside
from pipetrain.schedule.kinds import COPY_LANES, REDUCING
from pipetrain.schedule.op import Kind, Lane

_LABEL_COLUMNS = 3  # an op gets this many columns if there is room: "F0" and a gap of its own kind


def staircase(
    timeline: Timeline,
    *,
    width: int = 80,
    colour: bool = False,
    num_stages: int | None = None,
    seconds: float | None = None,
) -> str:
    """The computing ops of a timeline, never wider than `width` columns.

    `F0`, `R0`, `B0` are of microbatch 0, with the stage in front (`2F0`) where a rank has several; `.` is bubble, `%` one in which
    gradients are added up. With
    `colour`, in ANSI colours. `seconds` is what the width stands for, if not this step: the longest of several steps puts
    them on one time scale. A rank whose R ran beside other ops, as on a GPU, has a second row for R. Copies of sets to host memory and back
    have a row each, with the numbers of the microbatches.
    """
    computing = [event for event in timeline.events if event.op.kind.computes]
    shared = len({(event.rank, event.op.stage) for event in computing}) > len({event.rank for event in computing})
    names_stage = (num_stages or 0) > timeline.num_ranks or shared
    labels = [f"rank {rank} " for rank in range(timeline.num_ranks)]
    margin = max((len(label) for label in labels), default=0)
    span = max(timeline.step_seconds, seconds or 0.0)
    columns = _columns(computing, span, max(1, width - margin), names_stage)
    lines = []
    for rank, label in enumerate(labels):
        events = sorted((event for event in computing if event.rank == rank), key=lambda event: event.start)
        lanes = (Lane.COMPUTE, Lane.RECOMPUTE) if ran_beside(events) else None
        rows = [[event for event in events if event.lane is lane] for lane in lanes] if lanes else [events]
        copies = [[event for event in timeline.of_rank(rank) if event.lane is lane] for lane in COPY_LANES]
        rows += [row for row in copies if row]
        for number, row in enumerate(rows):
            cells = _cells(row, timeline.start, span, columns)
            if number == 0:
                sums = [event for event in timeline.events if event.rank == rank and event.op.kind in REDUCING]
                cells = [cell or one for cell, one in zip(cells, _cells(sums, timeline.start, span, columns))]
            lines.append(f"{label if number == 0 else '':<{margin}}{_drawn(cells, names_stage, colour)}")
    return "\n".join(lines)


def legend(kinds: Iterable[Kind], *, colour: bool = False) -> str:
    """What the letters of `kinds` stand for, in one line."""
    words = [
        f"{_painted((kind.value if kind.computes else looks.character) + looks.character, looks, colour)} {looks.word}"
        for kind, looks in drawn_kinds(kinds).items()
    ]
    return "  ".join([*words, ". idle"])


def _columns(events: Sequence[OpEvent], step_seconds: float, room: int, names_stage: bool) -> int:
    """Columns for the step: whole ones per shortest op where that leaves place for its name, else the whole room."""
    shortest = min((event.end - event.start for event in events if event.end > event.start), default=0.0)
    if shortest <= 0.0:
        return room
    longest_name = max(len(_name(event, names_stage)) for event in events)
    per_op = min(int(room * shortest / step_seconds + 1e-9), max(_LABEL_COLUMNS, longest_name))
    return max(1, min(room, round(per_op * step_seconds / shortest))) if per_op >= longest_name else room


def _cells(events: Sequence[OpEvent], start: float, step_seconds: float, columns: int) -> list[OpEvent | None]:
    """Per column the event that covers most of it; None where most is bubble."""
    cells: list[OpEvent | None] = []
    first = 0
    for column in range(columns):
        left = start + step_seconds * column / columns
        right = start + step_seconds * (column + 1) / columns
        while first < len(events) and events[first].end <= left:
            first += 1
        best, covered, most = None, 0.0, 0.0
        for event in events[first:]:
            if event.start >= right:
                break
            part = min(event.end, right) - max(event.start, left)
            covered += part
            if part > most * (1 + 1e-9):
                best, most = event, part
        cells.append(best if covered >= (right - left) / 2 else None)
    return cells


def _drawn(cells: Sequence[OpEvent | None], names_stage: bool, colour: bool) -> str:
    drawn = ""
    for event, same in itertools.groupby(cells, key=lambda cell: cell):
        columns = len(list(same))
        if event is None:
            drawn += "." * columns
            continue
        kind, name, looks = event.op.kind, _name(event, names_stage), looks_of(event.op.kind)
        if len(name) > columns:
            name = kind.value if kind.computes else ""
        drawn += _painted(name.ljust(columns, " " if colour else looks.character), looks, colour)
    return drawn.rstrip() if colour else drawn


def _name(event: OpEvent, names_stage: bool) -> str:
    if not event.op.kind.computes:
        return str(event.op.microbatch) if event.lane in COPY_LANES else ""
    return str(event.op) if names_stage else str(event.op).removeprefix(str(event.op.stage))


def _painted(text: str, looks: Looks, colour: bool) -> str:
    return f"\x1b[{looks.ansi}m{text}\x1b[0m" if colour else text
