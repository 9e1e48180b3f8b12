"""A timeline as an SVG picture: a row per rank, a box per op; legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from pipetrain.monitor.draw.palette import LOOKS, THEME, drawn_kinds, looks_of
from pipetrain.monitor.draw.table import number
from pipetrain.monitor.shown import Shown
from pipetrain.schedule.events import OpEvent, ran_beside
from pipetrain.schedule.op import Lane

_WIDTH, _MARGIN = 960, 16
_LEFT, _RIGHT = 74, 16  # beside the time axis
_CHARACTER, _SPARE = 6.6, 3.0  # the width of one in a name, and what a box must be wider than its name

_ROW, _GAP, _FOOT = 30, 7, 4
_HEAD = 62
_INK_ON_PALE = "#14181d"
_FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_HATCH = """<defs><pattern id="exposed" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2.2" height="6" fill="#3d2600" fill-opacity=".35"/></pattern></defs>"""


def svg(*shown: Shown) -> str:
    """One picture of one schedule, or of several below each other on one time scale."""
    longest = max(one.step_seconds for one in shown)
    pieces, top = [], _MARGIN
    for one in shown:
        pieces.append(_panel(one, top, longest))
        top += _HEAD + one.schedule.num_ranks * (_ROW + _GAP) + 42
    height = top + 12
    shape = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="{_FONT}" font-size="13" role="img">',
            f"<title>{escape('; '.join(one.title for one in shown))}</title>",
            f"<style>{THEME}</style>",
            _HATCH,
            *pieces,
            f'<g class="legend">{_legend(shown, height - 14)}</g>',
            "</svg>\n",
        ]
    )


@dataclass(frozen=True)
class _Row:
    """Where a rank's boxes go: seconds from `start` on times `scale`, from `_LEFT` to the right, at height `y`."""

    start: float
    scale: float
    y: float
    height: float = _ROW

    def across(self, begin: float, end: float) -> tuple[float, float]:
        """x and width of a span of time."""
        return _LEFT + (begin - self.start) * self.scale, (end - begin) * self.scale


def _panel(one: Shown, top: int, longest: float) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / longest if longest > 0 else 0.0
    several = one.schedule.num_stages > one.schedule.num_ranks
    ranks = range(one.schedule.num_ranks)
    rows = [_Row(one.start, scale, top + _HEAD + rank * (_ROW + _GAP)) for rank in ranks]
    bottom = top + _HEAD + len(rows) * (_ROW + _GAP)
    pieces = [_heading(one, top), _axis(one, bottom, scale)]
    for rank, row in enumerate(rows):
        x, length = row.across(one.start, one.end)
        label = f'x="{_MARGIN}" y="{row.y + _ROW / 2 + 4.5:g}">{one.rank_name(rank)}'
        pieces.append(f'<text class="text" {label}</text>')
        pieces.append(f'<rect class="idle" x="{x}" y="{row.y}" width="{length:.2f}" height="{_ROW}" rx="3"/>')
        pieces += _boxes(one, rank, row, several)
    return "\n".join(pieces)


def _boxes(one: Shown, rank: int, row: _Row, several: bool) -> list[str]:
    """The ops of a rank, paler those of its later stages; where R ran beside the others, as on a GPU, R in the lower part of the row. What adds
    up gradients or copies sets, which does not occupy the rank, is a line at its foot; at its head, if it copies a set back."""
    head, foot = replace(row, height=_FOOT), replace(row, y=row.y + _ROW - _FOOT, height=_FOOT)
    beside = [event for event in one.timeline.of_rank(rank) if event.op.kind.row.looks and not event.op.kind.computes]
    events = [event for event in one.timeline.of_rank(rank) if event.op.kind.computes]
    rows = dict.fromkeys(Lane, row)
    exposed = row
    if ran_beside(events):
        upper = round(_ROW * 0.6)
        rows = dict.fromkeys(Lane, replace(row, height=upper - 1))
        rows[Lane.RECOMPUTE] = exposed = replace(row, y=row.y + upper, height=_ROW - upper)
    pieces, later = [], one.stages_of(rank)[1:]
    for event in events:
        data = f'class="op" data-microbatch="{event.op.microbatch}"'
        filled = f'rx="3" fill="{looks_of(event.op.kind).fill}">{_title(event, row.start)}'
        pieces.append(_rect(rows[event.lane], event.start, event.end, data, filled, inset=0.75))
        if event.op.stage in later:
            paler = 'rx="3" fill="#ffffff" fill-opacity=".45" pointer-events="none"/>'
            pieces.append(_rect(rows[event.lane], event.start, event.end, 'class="later"', paler, inset=0.75))
    for event in beside:
        filled = f'fill="{looks_of(event.op.kind).fill}">{_title(event, row.start)}'
        line = head if event.lane is Lane.RELOAD else foot
        pieces.append(_rect(line, event.start, event.end, f'class="{event.lane.value}"', filled))
    hatched = 'rx="3" fill="url(#exposed)" pointer-events="none"/>'  # recomputation for which the next op had to wait
    pieces += [_rect(exposed, begin, end, 'class="hatch"', hatched) for begin, end in one.exposed(rank)]
    return [*pieces, *(_name(event, rows[event.lane], several, event.op.stage in later) for event in events)]


def _rect(row: _Row, begin: float, end: float, before: str, after: str, *, inset: float = 0.0) -> str:
    """A box over a span of time, with other attributes `before` and `after` its place."""
    x, width = row.across(begin, end)
    inset = min(inset, width / 8)
    place = f'x="{x + inset:.2f}" y="{row.y}" width="{width - 2 * inset:.2f}" height="{row.height}"'
    return f"<rect {before} {place} {after}"


def _heading(one: Shown, top: int) -> str:
    return (
        f'<text class="text" x="{_MARGIN}" y="{top + 16}" font-size="17" font-weight="600">{escape(one.title)}</text>'
        f'<text class="faint" x="{_MARGIN}" y="{top + 38}">{escape(one.facts)}</text>'
    )


def _title(event: OpEvent, start: float) -> str:
    """For example `2B1  backward: 12 to 14 s, takes 2 s`, on the clock of the axis."""
    times = f"{number(event.start - start)} to {number(event.end - start)} s"
    taken = f"{looks_of(event.op.kind).word}: {times}, takes {number(event.end - event.start)} s"
    return f"<title>{event.op}  {taken}</title></rect>"


def _name(event: OpEvent, row: _Row, several: bool, is_pale: bool) -> str:
    """The op's name in its box; the kind alone, or nothing, where that does not fit."""
    x, width = row.across(event.start, event.end)
    short = f"{event.op}".removeprefix(f"{event.op.stage}")
    names = [*([str(event.op)] if several else []), short, event.op.kind.value]
    name = next((name for name in names if _CHARACTER * len(name) + _SPARE <= width), None)
    if name is None:
        return ""
    return (
        f'<text class="name" x="{x + width / 2:.2f}" y="{row.y + row.height / 2 + 4.2:g}" fill="{_INK_ON_PALE if is_pale else looks_of(event.op.kind).ink}"'
        f' font-size="12" text-anchor="middle" pointer-events="none">{name}</text>'
    )


def _axis(one: Shown, y: float, scale: float) -> str:
    marks = []
    for mark in _ticks(one.step_seconds):
        x = _LEFT + mark * scale
        marks.append(f'<line class="line" x1="{x:.2f}" y1="{y - 3}" x2="{x:.2f}" y2="{y + 3}"/>')
        marks.append(
            f'<text class="faint" x="{x:.2f}" y="{y + 16}" font-size="11" text-anchor="middle">{number(mark)} s</text>'
        )
    return "".join(marks)


def _ticks(step_seconds: float) -> Sequence[float]:
    """Round numbers from 0 to the step's end, five to ten of them."""
    if step_seconds <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(step_seconds))
    step = next(part * unit / 10 for part in (1, 2, 5, 10) if step_seconds / (part * unit / 10) <= 10)
    return [count * step for count in range(int(step_seconds / step + 1e-9) + 1)]


def _legend(shown: Sequence[Shown], y: float) -> str:
    """The kinds that are in the picture, exposed recomputation where there is some, and the bubble."""
    kinds = drawn_kinds(event.op.kind for one in shown for event in one.timeline.events)
    entries = [(f'fill="{looks.fill}"', f"{kind.value} {looks.word}") for kind, looks in kinds.items()]
    if any(rank.recompute_exposed_seconds > 0 for one in shown for rank in one.breakdown):
        entries.append(('fill="url(#exposed)"', "exposed: the next op waits for it"))
    entries.append(('class="idle"', "bubble: nothing runs"))
    pieces, x = [], float(_LEFT)
    for looks, words in entries:
        sample = f'<rect x="{x:g}" y="{y - 10}" width="14" height="12" rx="2"'
        under = f'{sample} fill="{LOOKS["recompute"].fill}"/>' if "exposed" in looks else ""
        pieces.append(f"{under}{sample} {looks}/>")
        pieces.append(f'<text class="faint" x="{x + 20:g}" y="{y}" font-size="12">{words}</text>')
        x += 40 + 6.5 * len(words)
    return "".join(pieces)
