"""`pipetrain show`: draws a schedule and its cost, or compares two schedules."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipetrain.cli.main import Arguments, Parser, add_json, add_overrides, ending_of, present, writing
from pipetrain.config.load import load_config
from pipetrain.config.phases import phases_of
from pipetrain.config.records import RunConfig
from pipetrain.launcher.outcome import Exit
from pipetrain.monitor.draw.page import html, mesh_html, ranks_table, schedules_table
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.draw.terminal import MeshShown, draw_mesh, legend, staircase
from pipetrain.monitor.shown import Shown, chrome_trace
from pipetrain.plan.profile import read_profile
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.policy import Mode
from pipetrain.trainer.prepare import predict, predict_mesh


def add_arguments(parser: Parser) -> None:
    add_overrides(parser)
    add_json(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="write FILE.svg, .html, .json, .csv or .trace.json (for Perfetto)"
    )
    parser.add_argument(
        "--phase", type=int, metavar="N", help="show the schedule of phase N, counted from 0 (default: 0)"
    )
    parser.add_argument(
        "--against", metavar="'KEY=VALUE ...'", help="compare with a second schedule: the first with these changes"
    )
    parser.add_argument(
        "--mesh",
        action="store_true",
        help="also draw the ranks of all replicas: their nodes, what each rank holds, and what it sends to which rank",
    )
    parser.add_argument("--width", type=int, help="columns of the drawing (default: the terminal's)")


def run(arguments: Arguments) -> int:
    both = [arguments.overrides]
    if arguments.against is not None:
        both.append([*arguments.overrides, *shlex.split(arguments.against)])
    configs, shown = zip(*(_predicted(overrides, arguments.phase) for overrides in both))
    meshes = []
    if arguments.mesh:
        meshes = [MeshShown(*predict_mesh(config, one.schedule)) for config, one in zip(configs, shown)]
    if arguments.out is not None:
        is_page = arguments.out.endswith(".html") and len(shown) == 1
        write_drawing(shown, Path(arguments.out), meshes, _with_other_sets(configs[0], shown[0]) if is_page else None)
    present(
        arguments,
        lambda: "\n\n".join([*map(draw_mesh, meshes), draw(shown, width=arguments.width)]),
        lambda: _values(shown, meshes),
        coloured=True,
    )
    return Exit.DONE


def _predicted(overrides: Sequence[str], phase: int | None) -> tuple[RunConfig, Shown]:
    config = load_config(overrides)
    if config.plan.profile is not None:
        # The schedule has the stages and microbatches of that run, unless the user sets others.
        profile = read_profile(config.plan.profile)
        if profile.costs is not None:
            keys = {"num_stages": profile.costs.num_stages, "num_microbatches": profile.num_microbatches}
            overrides = [*(f"pipeline.{key}={value}" for key, value in keys.items()), *overrides]
            config = load_config(overrides)
    phases = phases_of(config)
    if phase is not None and not 0 <= phase < len(phases):
        there = f"there are phases 0 to {len(phases) - 1}" if config.phases else "the run has no phases"
        raise ValueError(f"--phase={phase}: {there}")
    config = phases[phase or 0].config
    return config, predict(config)


def _with_other_sets(config: RunConfig, one: Shown) -> dict[str, Shown]:
    """The same family with one activation set per stage, with two, and so on; none where nothing is recomputed, the order is no family's, or
    that would take long."""
    m, recompute, schedule = one.schedule.num_microbatches, config.recompute, config.pipeline.schedule
    is_family = schedule != AUTO and not set(schedule) & set(".:")
    if one.schedule.policy.mode is Mode.NEVER or not is_family or one.schedule.num_stages * m > _MOST_PASSES:
        return {}
    found = {}
    for sets in range(1, min(m, _MOST_SETS) + 1):
        with suppress(ValueError):  # the keys do not fit each other
            name = f"{sets} activation {'sets' if sets > 1 else 'set'} per stage"
            found[name] = predict(replace(config, recompute=replace(recompute, sets=sets)))
    return found


def draw(shown: Sequence[Shown], width: int | None = None) -> str:
    """For each schedule its staircase and a line per rank, then all in one table; in colours on a terminal."""
    columns = width or shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty()
    pictures = []
    for one in shown:
        steps = staircase(one.timeline, width=columns, colour=colour)
        proven = None if one.proof is None else f"step {one.proof}"
        parts = (one.title, steps, ranks_table(one.breakdown).as_text(), proven)
        pictures.append("\n\n".join(filter(None, parts)))
    kinds = [event.op.kind for one in shown for event in one.timeline.events]
    return "\n\n".join([*pictures, legend(kinds, colour=colour), "seconds\n" + schedules_table(shown).as_text()])


def write_drawing(
    shown: Sequence[Shown], path: Path, meshes: Sequence[MeshShown] = (), others: Mapping[str, Shown] | None = None
) -> None:
    """Writes the schedules in the format of the ending of `path`. A page and JSON also have the `meshes`; a page `others` to pick from.

    Raises:
        ValueError: an unknown format, one that holds a single schedule, or a file that cannot be written.
    """
    ending = ending_of(path, _FORMATS)
    if len(shown) > 1 and ending not in _FORMATS_FOR_SEVERAL:
        raise ValueError(f"--out={path}: {ending} holds one schedule; with --against use .svg or .html")
    if meshes and ending not in _FORMATS_WITH_MESH:
        raise ValueError(f"--out={path}: {ending} holds no mesh; with --mesh use {' or '.join(_FORMATS_WITH_MESH)}")
    with writing(path):
        path.write_text(_FORMATS[ending](shown, meshes, others))


def _values(shown: Sequence[Shown], meshes: Sequence[MeshShown]) -> Any:
    """The values for `--json` and FILE.json: a list if there are several schedules."""
    values = [one.as_json() for one in shown]
    for value, mesh in zip(values, meshes):
        value["mesh"] = mesh.as_json()
    return values[0] if len(values) == 1 else values


_FORMATS: dict[str, Callable[[Sequence[Shown], Sequence[MeshShown], Mapping[str, Shown] | None], str]] = {
    ".svg": lambda shown, *_: svg(*shown),
    ".html": lambda shown, meshes, others: html(*shown, above=list(map(mesh_html, meshes)), others=others),
    ".csv": lambda shown, *_: write_csv(shown[0].schedule),
    ".trace.json": lambda shown, *_: chrome_trace(shown[0].timeline),
    ".json": lambda shown, meshes, _: json.dumps(_values(shown, meshes), indent=2) + "\n",
}
_MOST_SETS = 8  # that a page lets its reader choose from
_MOST_PASSES = 2**10  # stages x microbatches: eight times so many are simulated in less than a second
_FORMATS_FOR_SEVERAL = (".svg", ".html")
_FORMATS_WITH_MESH = (".html", ".json")
