"""A timeline as an SVG picture: a row per rank, a box per op, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from pipetrain.schedule.events import OpEvent, ran_beside
from pipetrain.schedule.op import Kind
from pipetrain.timeline.draw.palette import FILL, INK, THEME, WORDS
from pipetrain.timeline.shown import Shown

_MARGIN = 16
LEFT, RIGHT = 74, 16  # beside the time axis

_ROW, _GAP = 30, 7
_HEAD = 62
_TEXT = """font-family="ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13\""""
_HATCH = """<defs><pattern id="exposed" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2.2" height="6" fill="#3d2600" fill-opacity=".35"/></pattern></defs>"""


def svg(*shown: Shown, width: int = 960) -> str:
    """One picture of one schedule, or of several below each other on one time scale."""
    longest = max(one.step_seconds for one in shown)
    pieces, top = [], _MARGIN
    for one in shown:
        pieces.append(_panel(one, top, width, longest))
        top += _panel_height(one) + 18
    height = top + 12
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_TEXT} role="img">',
            f"<title>{escape('; '.join(one.title for one in shown))}</title>",
            f"<style>{THEME}</style>",
            _HATCH,
            *pieces,
            _legend(width, height - 14),
            "</svg>\n",
        ]
    )


def _panel_height(one: Shown) -> int:
    return _HEAD + one.schedule.num_ranks * (_ROW + _GAP) + 24


@dataclass(frozen=True)
class _Row:
    """Where a rank's boxes go: seconds from `start` on times `scale`, from `LEFT` to the right, at height `y`."""

    start: float
    scale: float
    y: float
    height: float = _ROW

    def across(self, begin: float, end: float) -> tuple[float, float]:
        """x and width of a span of time."""
        return LEFT + (begin - self.start) * self.scale, (end - begin) * self.scale


def _panel(one: Shown, top: int, width: int, longest: float) -> str:
    scale = (width - LEFT - RIGHT) / longest if longest > 0 else 0.0
    several = one.schedule.num_stages > one.schedule.num_ranks
    lines = [_heading(one, top)]
    for rank in range(one.schedule.num_ranks):
        row = _Row(one.timeline.start, scale, top + _HEAD + rank * (_ROW + _GAP))
        x, length = row.across(one.timeline.start, one.timeline.end)
        lines.append(f'<text class="text" x="{_MARGIN}" y="{row.y + _ROW / 2 + 4.5:g}">rank {rank}</text>')
        lines.append(f'<rect class="idle" x="{x}" y="{row.y}" width="{length:.2f}" height="{_ROW}" rx="3"/>')
        lines += _boxes(one, rank, row, several)
    lines.append(_axis(one, top + _HEAD + one.schedule.num_ranks * (_ROW + _GAP), scale))
    return "\n".join(lines)


def _boxes(one: Shown, rank: int, row: _Row, several: bool) -> list[str]:
    """The ops of a rank; where R ran beside the others, as on a GPU, R in the lower part of the row."""
    events = [event for event in one.timeline.of_rank(rank) if event.op.kind.computes]
    rows = dict.fromkeys(WORDS, row)
    if ran_beside(events):
        upper = round(_ROW * 0.6)
        rows = dict.fromkeys(WORDS, replace(row, height=upper - 1))
        rows[Kind.R] = replace(row, y=row.y + upper, height=_ROW - upper)
    return [
        *(_box(event, rows[event.op.kind]) for event in events),
        *(_hatch(begin, end, rows[Kind.R]) for begin, end in one.exposed(rank)),
        *(_name(event, rows[event.op.kind], several) for event in events),
    ]


def _heading(one: Shown, top: int) -> str:
    facts = [f"step {_number(one.step_seconds)}", f"bound {_number(one.bound_seconds)}"]
    facts.append(f"bubble {one.bubble_fraction:.0%}")
    recompute = sum(rank.recompute_hidden_seconds + rank.recompute_exposed_seconds for rank in one.breakdown)
    if recompute > 0:
        hidden = sum(rank.recompute_hidden_seconds for rank in one.breakdown)
        facts.append(f"recompute hidden {_number(hidden)} of {_number(recompute)}")
    facts.append(f"sets alive per rank {' '.join(str(rank.peak_sets) for rank in one.breakdown)}")
    return (
        f'<text class="text" x="{_MARGIN}" y="{top + 16}" font-size="17" font-weight="600">{escape(one.title)}</text>'
        f'<text class="faint" x="{_MARGIN}" y="{top + 38}">{escape("  ·  ".join(facts))}</text>'
    )


def _number(value: float) -> str:
    return f"{value:.4g}"


def _box(event: OpEvent, row: _Row) -> str:
    x, width = row.across(event.start, event.end)
    inset = min(0.75, width / 8)
    return (
        f'<rect class="op" data-microbatch="{event.op.microbatch}" x="{x + inset:.2f}" y="{row.y}"'
        f' width="{width - 2 * inset:.2f}" height="{row.height}" rx="3" fill="{FILL[event.op.kind]}">'
        f"<title>{event.op}  {_number(event.start)} to {_number(event.end)}</title></rect>"
    )


def _name(event: OpEvent, row: _Row, several: bool) -> str:
    """The op's name in its box; the kind alone, or nothing, where that does not fit."""
    x, width = row.across(event.start, event.end)
    kind = event.op.kind
    names = [f"{kind.value}{event.op.microbatch}", kind.value]
    names = [str(event.op), *names] if several else names
    name = next((name for name in names if 6.6 * len(name) + 3 <= width), None)
    if name is None:
        return ""
    return (
        f'<text x="{x + width / 2:.2f}" y="{row.y + row.height / 2 + 4.2:g}" fill="{INK[kind]}" font-size="12"'
        f' text-anchor="middle" pointer-events="none">{name}</text>'
    )


def _hatch(begin: float, end: float, row: _Row) -> str:
    """Marks recomputation for which the next op had to wait."""
    x, width = row.across(begin, end)
    return (
        f'<rect x="{x:.2f}" y="{row.y}" width="{width:.2f}" height="{row.height}" rx="3" fill="url(#exposed)"'
        ' pointer-events="none"/>'
    )


def _axis(one: Shown, y: float, scale: float) -> str:
    marks = []
    for mark in _ticks(one.step_seconds):
        x = LEFT + mark * scale
        marks.append(f'<line class="line" x1="{x:.2f}" y1="{y - 3}" x2="{x:.2f}" y2="{y + 3}"/>')
        marks.append(
            f'<text class="faint" x="{x:.2f}" y="{y + 16}" font-size="11" text-anchor="middle">{_number(mark)}</text>'
        )
    return "".join(marks)


def _ticks(step_seconds: float) -> Sequence[float]:
    """Round numbers from 0 to the step's end, five to ten of them."""
    if step_seconds <= 0:
        return [0.0]
    size = 10.0
    while size > step_seconds:
        size /= 10
    while size * 10 <= step_seconds:
        size *= 10
    step = next(part * size / 10 for part in (1, 2, 5, 10) if step_seconds / (part * size / 10) <= 10)
    return [number * step for number in range(int(step_seconds / step + 1e-9) + 1)]


def _legend(width: int, y: float) -> str:
    pieces, x = [], float(LEFT)
    for kind, word in WORDS.items():
        pieces.append(f'<rect x="{x:g}" y="{y - 10}" width="14" height="12" rx="2" fill="{FILL[kind]}"/>')
        pieces.append(f'<text class="faint" x="{x + 20:g}" y="{y}" font-size="12">{kind} {word}</text>')
        x += 34 + 7 * len(word) + 14
    pieces.append(f'<rect x="{x:g}" y="{y - 10}" width="14" height="12" rx="2" fill="{FILL[Kind.R]}"/>')
    pieces.append(f'<rect x="{x:g}" y="{y - 10}" width="14" height="12" rx="2" fill="url(#exposed)"/>')
    pieces.append(f'<text class="faint" x="{x + 20:g}" y="{y}" font-size="12">exposed: the next op waits for it</text>')
    x += 232
    pieces.append(f'<rect class="idle" x="{x:g}" y="{y - 10}" width="14" height="12" rx="2"/>')
    pieces.append(f'<text class="faint" x="{x + 20:g}" y="{y}" font-size="12">bubble</text>')
    pieces.append(f'<text class="faint" x="{width - _MARGIN}" y="{y}" font-size="12" text-anchor="end">seconds</text>')
    return "".join(pieces)
