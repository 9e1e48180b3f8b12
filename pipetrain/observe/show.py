"""What `pipetrain show` prints and writes: the drawing of a schedule and a table of what it costs."""

from __future__ import annotations

import shutil
import sys

from pipetrain.observe.table import number, table
from pipetrain.schedule.breakdown import RankBreakdown
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
