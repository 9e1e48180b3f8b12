"""What `pipetrain show` prints and writes: one schedule, or two of them beside each other."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipetrain.observe.mesh_drawing import MeshShown, mesh_html, meshes_svg
from pipetrain.schedule.alive import idle_places
from pipetrain.schedule.csv_file import pairs_in_csv, write_csv
from pipetrain.timeline.draw.chrome_trace import chrome_trace
from pipetrain.timeline.draw.page import html
from pipetrain.timeline.draw.rank_table import ranks_table, schedules_table
from pipetrain.timeline.draw.svg import svg
from pipetrain.timeline.draw.terminal import legend, staircase
from pipetrain.timeline.shown import Shown


def draw(shown: Sequence[Shown], width: int | None = None) -> str:
    """For each schedule its staircase and a line per rank, then all in one table; in colours on a terminal."""
    columns = width or shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty()
    pictures = [_picture(one, columns, colour) for one in shown]
    kinds = [event.op.kind for one in shown for event in one.timeline.events]
    return "\n\n".join([*pictures, legend(kinds, colour=colour), "seconds\n" + schedules_table(shown).as_text()])


def _picture(one: Shown, width: int, colour: bool) -> str:
    steps = staircase(one.timeline, width=width, colour=colour, num_stages=one.schedule.num_stages)
    sought = None if one.proof is None else f"step {one.proof}"
    notes = (pairs_in_csv(one.schedule.family), sought, idle_places(one.schedule))
    said = "".join(f"\n\n{note}" for note in notes if note)
    return f"{one.title}\n\n{steps}\n\n{ranks_table(one.breakdown).as_text()}{said}"


def write_drawing(shown: Sequence[Shown], path: Path, meshes: Sequence[MeshShown] = ()) -> None:
    """The schedules in the format that the name of `path` asks for. With `meshes` a page and JSON have these, too, and a picture is theirs.

    Raises:
        ValueError: an unknown format, one that holds a single schedule, or a file that cannot be written.
    """
    ending = next((ending for ending in _FORMATS if path.name.endswith(ending)), None)
    if ending is None:
        raise ValueError(f"--out={path}: {path.suffix or 'no ending'} is unknown; allowed are {', '.join(_FORMATS)}")
    if len(shown) > 1 and ending not in _FORMATS_FOR_SEVERAL:
        raise ValueError(f"--out={path}: {ending} holds one schedule; with --against use .svg or .html")
    with_meshes = _FORMATS_OF_MESHES.get(ending) if meshes else None
    try:
        path.write_text(with_meshes(shown, meshes) if with_meshes else _FORMATS[ending](*shown))
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error


_FORMATS: dict[str, Callable[..., str]] = {
    ".svg": svg,
    ".html": html,
    ".csv": lambda one: write_csv(one.schedule),
    ".trace.json": lambda one: chrome_trace(one.timeline),
    ".json": lambda one: json.dumps(one.as_json(), indent=2) + "\n",
}
_FORMATS_OF_MESHES: dict[str, Callable[..., str]] = {
    ".svg": lambda _, meshes: meshes_svg(meshes),
    ".html": lambda shown, meshes: html(*shown, above=list(map(mesh_html, meshes))),
    ".json": lambda shown, meshes: json.dumps({**shown[0].as_json(), "mesh": meshes[0].as_json()}, indent=2) + "\n",
}
_FORMATS_FOR_SEVERAL = (".svg", ".html")
