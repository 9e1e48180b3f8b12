"""What `pipetrain show` prints and writes: the drawing of a schedule and a table of what it costs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from pipetrain.observe.page import page
from pipetrain.observe.table import number, table
from pipetrain.schedule.breakdown import RankBreakdown
from pipetrain.schedule.op import Lane
from pipetrain.schedule.render.svg import svg
from pipetrain.schedule.render.terminal import legend, staircase
from pipetrain.schedule.show import Shown

_SECONDS = "{:.4g}"


def draw(shown: Shown, width: int | None = None) -> str:
    """Title, staircase, legend, the figures of the step and a line per rank; in colours on a terminal."""
    columns = width or shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty()
    figures = (
        f"step {shown.step_seconds:.4g} s   no order could take less than {shown.bound_seconds:.4g} s   "
        f"bubble {shown.bubble_fraction:.1%}"
    )
    return "\n".join(
        [
            shown.title,
            "",
            staircase(shown.timeline, width=columns, colour=colour, num_stages=shown.schedule.num_stages),
            legend(colour=colour),
            "",
            figures,
            "",
            table(
                ("seconds", "busy", "fill", "drain", "wait act.", "wait grad.", "R hidden", "R exposed", "peak sets"),
                [_row(rank) for rank in shown.breakdown],
            ),
        ]
    )


def write_drawing(shown: Shown, path: Path) -> None:
    """The schedule in the format that the name of `path` asks for.

    Raises:
        ValueError: an unknown format, or a file that cannot be written.
    """
    if path.suffix not in _FORMATS:
        raise ValueError(f"--out={path}: {path.suffix or 'no ending'} is unknown; allowed are {', '.join(_FORMATS)}")
    try:
        path.write_text(_FORMATS[path.suffix](shown))
    except OSError as error:
        raise ValueError(f"--out={path}: cannot be written ({error.strerror})") from error


def _as_html(shown: Shown) -> str:
    return page(shown.title, [], svg(shown))


def _as_json(shown: Shown) -> str:
    return json.dumps(shown.as_json(), indent=2) + "\n"


def _as_csv(shown: Shown) -> str:
    """A row per rank: its compute lane in order, in the spelling of torch.distributed.pipelining plus R."""
    schedule = shown.schedule
    ranks = range(schedule.num_ranks)
    return "".join(",".join(map(str, schedule.lane(rank, Lane.COMPUTE))) + "\n" for rank in ranks)


_FORMATS: dict[str, Callable[[Shown], str]] = {".svg": svg, ".html": _as_html, ".json": _as_json, ".csv": _as_csv}


def _row(rank: RankBreakdown) -> tuple[str, ...]:
    seconds = (
        rank.busy_seconds,
        rank.fill_seconds,
        rank.drain_seconds,
        rank.wait_activation_seconds,
        rank.wait_gradient_seconds,
        rank.recompute_hidden_seconds,
        rank.recompute_exposed_seconds,
    )
    return (f"rank {rank.rank}", *(number(value, _SECONDS) for value in seconds), str(rank.peak_sets))
