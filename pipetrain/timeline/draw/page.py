"""Pages that open anywhere: one file each, nothing loaded from elsewhere.

`page` is their frame; `pictures`, `recomputation` and `rank_numbers` are what a page about steps is made of, and `html` is
such a page, of schedules before they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pipetrain.timeline.draw.memory_curves import held_words, memory_curves
from pipetrain.timeline.draw.page_looks import SCRIPT, STYLE
from pipetrain.timeline.draw.rank_table import causes, ranks_table, schedules_table
from pipetrain.timeline.draw.svg import svg
from pipetrain.timeline.draw.table import Table, number
from pipetrain.timeline.shown import Shown

_WIDTH = 1160  # pixels; where there is another width, the script stretches the time axis to it


def page(title: str, *parts: str) -> str:
    """The frame: `parts` are HTML, below each other."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
{chr(10).join(parts)}
<div id="tip"></div><script>{SCRIPT}</script></body></html>
"""


def html(*shown: Shown) -> str:
    """The page for one schedule, or for several on one time scale."""
    names = [one.title for one in shown]
    return page(
        "; ".join(names),
        pictures(shown, names),
        recomputation(shown, names),
        heading("Numbers"),
        framed(schedules_table(shown)),
        rank_numbers(shown, names),
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def framed(table: Table) -> str:
    """A table that scrolls where the window is narrower."""
    return f'<div class="table">{table.as_html()}</div>'


def pictures(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """The steps on one time scale, and below them what the ranks held on the same."""
    longest = max(one.step_seconds for one in shown)
    curves = [
        heading(f"{name} · {held_words(one)}") + memory_curves(one, width=_WIDTH, longest=longest)
        for one, name in zip(shown, names, strict=True)
    ]
    zoom = '<label id="zoom">Stretch the time axis <input type="range" min="0" value="0" step="any"></label>'
    return "\n".join([zoom, '<div class="scroll">', svg(*shown, width=_WIDTH, names=names), *curves, "</div>"])


def recomputation(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """Where the recomputation of each step went, in a sentence or three."""
    meanings = [(name, recompute_words(one)) for one, name in zip(shown, names, strict=True)]
    return heading("Where the recomputation went") + _list(meanings)


def recompute_words(one: Shown) -> str:
    """How much of the recomputation was hidden, how much exposed, and on which rank most; seconds summed over ranks."""
    exposed = [rank.recompute_exposed_seconds for rank in one.breakdown]
    hidden = sum(rank.recompute_hidden_seconds for rank in one.breakdown)
    total = hidden + sum(exposed)
    if total <= 0:
        return "Nothing was recomputed."
    words = (
        f"Recomputation took {number(total)} s of all ranks. Hidden: {number(hidden)} s ({hidden / total:.0%}), in which the "
        f"rank would have waited. Exposed: {number(sum(exposed))} s ({sum(exposed) / total:.0%})"
    )
    if sum(exposed) <= 0:
        return f"{words}: no op had to wait for it."
    worst = max(range(len(exposed)), key=exposed.__getitem__)
    return f"{words}, in which the next op had all its inputs and could not run yet; most on rank {worst}, {number(exposed[worst])} s."


def rank_numbers(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """For each step a table with a line per rank, and what its columns mean."""
    tables = [
        heading(f"{name} · seconds per rank") + framed(ranks_table(one.breakdown))
        for one, name in zip(shown, names, strict=True)
    ]
    meanings = {
        "busy": "the rank computed; all columns up to unexplained add up to the step",
        **causes(),
        "R hidden": "recomputation that cost no time: the rank would have waited",
        "R exposed": "recomputation for which the next op had to wait",
        "peak sets": "sets of activations alive at once",
    }
    return "\n".join([*tables, _list(meanings.items())])


def _list(meanings: Iterable[tuple[str, str]]) -> str:
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in meanings)
    return f"<dl>{entries}</dl>"
