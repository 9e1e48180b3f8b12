"""`pipetrain show`: a schedule, drawn, and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipetrain.cli.command import Arguments, Command, Parser, add_json, add_overrides, present
from pipetrain.config.load import load
from pipetrain.config.phases import phases_of
from pipetrain.config.records import RunConfig
from pipetrain.launcher.outcome import Exit
from pipetrain.observe.drawing import draw, write_drawing
from pipetrain.observe.mesh_drawing import MeshShown, draw_mesh
from pipetrain.plan.profile import read_profile
from pipetrain.prepare import predict, predict_mesh
from pipetrain.timeline.shown import Shown


def _add_arguments(parser: Parser) -> None:
    add_overrides(parser)
    add_json(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="write FILE.svg, .html, .json, .csv or .trace.json (for Perfetto)"
    )
    parser.add_argument(
        "--phase", type=int, metavar="N", help="the schedule of this phase, from 0 (default: the first)"
    )
    parser.add_argument("--against", metavar="'KEY=VALUE ...'", help="a second schedule: the first with these changes")
    parser.add_argument(
        "--mesh",
        action="store_true",
        help="draw the ranks of all replicas, too: who is where, what each holds, and what is sent from where to where",
    )
    parser.add_argument("--width", type=int, help="columns of the drawing (default: the terminal's)")


def _show(arguments: Arguments) -> int:
    both = [arguments.overrides]
    if arguments.against is not None:
        both.append([*arguments.overrides, *shlex.split(arguments.against)])
    configs, shown = zip(*(_predicted(overrides, arguments.phase) for overrides in both))
    meshes = []
    if arguments.mesh:
        meshes = [MeshShown(*predict_mesh(config, one.schedule)) for config, one in zip(configs, shown)]
    if arguments.out is not None:
        write_drawing(shown, Path(arguments.out), meshes)

    def values() -> Any:
        drawn = [one.as_json() for one in shown]
        for value, mesh in zip(drawn, meshes):
            value["mesh"] = mesh.as_json()
        return drawn[0] if len(drawn) == 1 else drawn

    present(arguments, lambda: "\n\n".join([*map(draw_mesh, meshes), draw(shown, width=arguments.width)]), values)
    return Exit.DONE


def _predicted(overrides: Sequence[str], phase: int | None) -> tuple[RunConfig, Shown]:
    config = load(overrides)
    if config.plan.profile is not None:
        # A schedule for that run has its stages and its microbatches, where nothing else is said.
        profile = read_profile(config.plan.profile)
        if profile.costs is not None:
            keys = {"num_stages": profile.costs.num_stages, "num_microbatches": profile.num_microbatches}
            overrides = [*(f"pipeline.{key}={value}" for key, value in keys.items()), *overrides]
            config = load(overrides)
    phases = phases_of(config)
    if phase is not None and not 0 <= phase < len(phases):
        there = f"there are phases 0 to {len(phases) - 1}" if config.phases else "the run has no phases"
        raise ValueError(f"--phase={phase}: {there}")
    config = phases[phase or 0].config
    return config, predict(config)


COMMAND = Command(_add_arguments, _show)
