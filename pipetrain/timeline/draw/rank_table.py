"""Schedules beside each other in numbers: time, bubble, recomputation, sets and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.timeline.breakdown import RankBreakdown
from pipetrain.timeline.shown import Shown

_CAUSES = {
    "fill": "fill_seconds",
    "drain": "drain_seconds",
    "wait F": "wait_activation_seconds",
    "wait B": "wait_gradient_seconds",
    "imbalance": "imbalance_seconds",
    "unexplained": "other_seconds",
}


def comparison(*shown: Shown) -> str:
    """A line per schedule: step, bound and bubble, R hidden and exposed (summed over ranks), most sets and bytes."""
    head = ["schedule", "step s", "bound s", "bubble", "R hidden s", "R exposed s", "peak sets", "peak bytes"]
    rows = [[one.title, *_facts(one)] for one in shown]
    if all(one.peak_bytes() is None for one in shown):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return aligned([head, *rows])


def _facts(one: Shown) -> list[str]:
    hidden = sum(rank.recompute_hidden_seconds for rank in one.breakdown)
    exposed = sum(rank.recompute_exposed_seconds for rank in one.breakdown)
    held = one.peak_bytes()
    return [
        _seconds(one.step_seconds),
        _seconds(one.bound_seconds),
        f"{one.bubble_fraction:.1%}",
        _seconds(hidden),
        _seconds(exposed),
        str(max(rank.peak_sets for rank in one.breakdown)),
        "-" if held is None else f"{max(held):.3g}",
    ]


def ranks_table(breakdown: Sequence[RankBreakdown]) -> str:
    """A line per rank: busy seconds, the bubble by cause, R hidden and exposed, most sets alive."""
    head = ["rank", "busy", *_CAUSES, "R hidden", "R exposed", "peak sets"]
    rows = [
        [
            str(rank.rank),
            _seconds(rank.busy_seconds),
            *(_seconds(getattr(rank, name)) for name in _CAUSES.values()),
            _seconds(rank.recompute_hidden_seconds),
            _seconds(rank.recompute_exposed_seconds),
            str(rank.peak_sets),
        ]
        for rank in breakdown
    ]
    return aligned([head, *rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def _seconds(value: float) -> str:
    return f"{value:.4g}"
