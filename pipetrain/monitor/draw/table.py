"""Tables of text, laid out in one place: for a terminal, as markdown, for a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pipetrain.config.terminal import printable

Row = Sequence[str]
_NARROWEST_RULE = 3  # markdown wants three characters below a column's head


@dataclass(frozen=True)
class Table:
    """`rows` below a `head`, cell by cell. Columns are right-aligned, but for those in `left`. `words` say below what
    columns or rows mean: each its name and a sentence."""

    head: Row
    rows: Sequence[Row]
    left: frozenset[int] = frozenset({0})
    words: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", _cells_of(self.head))
        object.__setattr__(self, "rows", tuple(map(_cells_of, self.rows)))

    def as_text(self, *, ruled: bool = False) -> str:
        """Columns two spaces apart; `ruled`: with a line below the head."""
        widths = self._widths()
        rule = [["-" * width for width in widths]] if ruled else []
        lines = (self.head, *rule, *self.rows)
        return "\n".join("  ".join(self._padded(row, widths)).rstrip() for row in lines)

    def as_markdown(self) -> str:
        """Columns between bars, which line up as text too."""
        widths = self._widths(_NARROWEST_RULE)
        rule = (f"{'-' * (width + 1)}{'-' if column in self.left else ':'}" for column, width in enumerate(widths))
        lines = [f"| {' | '.join(self._padded(row, widths))} |" for row in (self.head, *self.rows)]
        words = ["", *(f"- {name}: {words}" for name, words in self.words)] if self.words else []
        return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:], *words])

    def as_html(self) -> str:
        """A `table` element, which scrolls where the window is narrower; below it the words."""
        head = "".join(self._cells("th", self.head))
        body = "".join(f"<tr>{''.join(self._cells('td', row))}</tr>" for row in self.rows)
        words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(printable(words))}</dd>" for name, words in self.words)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="table">{table}{words and f"<dl>{words}</dl>"}</div>'

    def _widths(self, least: int = 0) -> list[int]:
        return [max(least, *map(len, column)) for column in zip(self.head, *self.rows, strict=True)]

    def _padded(self, row: Row, widths: Iterable[int]) -> Iterator[str]:
        for column, (cell, width) in enumerate(zip(row, widths)):
            yield cell.ljust(width) if column in self.left else cell.rjust(width)

    def _cells(self, tag: str, row: Row) -> Iterator[str]:
        for column, cell in enumerate(row):
            side = ' class="left"' if column in self.left else ""
            yield f"<{tag}{side}>{escape(cell)}</{tag}>"


def _cells_of(row: Row) -> Row:
    return tuple(printable(cell, lines=False) for cell in row)


def number(value: float | None, shape: str = "{:.4g}") -> str:
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


def count_of(amount: int, noun: str, plural: str = "s") -> str:
    """For example `1 stage`, `2 stages`; `plural`: what is added to the noun."""
    return f"{amount:,} {noun}{plural if amount != 1 else ''}"
