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
    parser.add_argument("--width", type=int, help="columns of the drawing (default: the terminal's)")


def _show(arguments: Arguments) -> int:
    from pipetrain.observe.drawing import draw, write_drawing

    shown = [_predicted(arguments.overrides, arguments.phase)]
    if arguments.against is not None:
        shown.append(_predicted([*arguments.overrides, *shlex.split(arguments.against)], arguments.phase))
    if arguments.json is not None:
        values = [one.as_json() for one in shown]
        write_json(values[0] if len(values) == 1 else values, arguments.json)
    if arguments.out is not None:
        write_drawing(shown, Path(arguments.out))
    if arguments.json != STDOUT:
        print(draw(shown, width=arguments.width))
    return Exit.DONE


def _predicted(overrides: Sequence[str], phase: int | None) -> Shown:
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
    return predict(_in_phase(config, phase))


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
