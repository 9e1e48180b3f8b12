"""Tables in plain text that are markdown, too."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row]) -> str:
    """A table with its first column to the left and all others to the right."""
    widths = [max(3, *(len(row[column]) for row in (head, *rows))) for column in range(len(head))]
    rule = "|" + "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths)) + "|"
    return "\n".join([_line(head, widths), rule, *(_line(row, widths) for row in rows)])


def number(value: float | None, shape: str) -> str:
    """`value` in the `shape` of a format string; `-` where there is none."""
    return "-" if value is None else shape.format(value)


def size(num_bytes: float | None) -> str:
    """Bytes with the unit that suits."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"


def _line(row: Row, widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
    ]
    return "| " + " | ".join(cells) + " |"
