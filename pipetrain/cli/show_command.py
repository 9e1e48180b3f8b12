"""`pipetrain show`: a schedule, drawn, and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipetrain.cli.command import Arguments, Command, Parser, add_json, add_overrides
from pipetrain.launcher.outcome import Exit
from pipetrain.observe.output import STDOUT, write_json

if TYPE_CHECKING:
    from pipetrain.config.records import RunConfig
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
    from pipetrain.observe.drawing import draw, write_drawing
    from pipetrain.observe.mesh_drawing import MeshShown, draw_mesh
    from pipetrain.prepare import predict_mesh

    both = [arguments.overrides]
    if arguments.against is not None:
        both.append([*arguments.overrides, *shlex.split(arguments.against)])
    configs, shown = zip(*(_predicted(overrides, arguments.phase) for overrides in both))
    meshes = []
    if arguments.mesh:
        meshes = [MeshShown(*predict_mesh(config, one.schedule)) for config, one in zip(configs, shown)]
    if arguments.json is not None:
        values = [one.as_json() for one in shown]
        for value, mesh in zip(values, meshes):
            value["mesh"] = mesh.as_json()
        write_json(values[0] if len(values) == 1 else values, arguments.json)
    if arguments.out is not None:
        write_drawing(shown, Path(arguments.out), meshes)
    if arguments.json != STDOUT:
        print("\n\n".join([*map(draw_mesh, meshes), draw(shown, width=arguments.width)]))
    return Exit.DONE


def _predicted(overrides: Sequence[str], phase: int | None) -> tuple[RunConfig, Shown]:
    from pipetrain.config.load import load
    from pipetrain.plan.profile import read_profile
    from pipetrain.prepare import predict

    config = load(overrides)
    if config.plan.profile is not None:
        # A schedule for that run has its stages and its microbatches, where nothing else is said.
        profile = read_profile(config.plan.profile)
        if profile.costs is not None:
            keys = {"num_stages": profile.costs.num_stages, "num_microbatches": profile.num_microbatches}
            overrides = [*(f"pipeline.{key}={value}" for key, value in keys.items()), *overrides]
            config = load(overrides)
    config = _in_phase(config, phase)
    return config, predict(config)


def _in_phase(config: RunConfig, number: int | None) -> RunConfig:
    """The configuration in force in a phase.

    Raises:
        ValueError: there is no such phase.
    """
    from pipetrain.config.phases import phases_of

    phases = phases_of(config)
    if number is not None and not 0 <= number < len(phases):
        there = f"there are phases 0 to {len(phases) - 1}" if config.phases else "the run has no phases"
        raise ValueError(f"--phase={number}: {there}")
    return phases[number or 0].config


SHOW = Command("draw a schedule and say what it costs", _add_arguments, _show)
