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
from pipetrain.timeline.draw.svg import HATCH, svg
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


def html(*shown: Shown, above: Sequence[str] = ()) -> str:
    """The page for one schedule, or for several on one time scale, below what is HTML already."""
    names = [one.title for one in shown]
    return page(
        "; ".join(names),
        *above,
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
    return _scrolled(svg(*shown, width=_WIDTH, names=names), *_curves(shown, names, longest))


def pictures_of_replicas(above: Sequence[Shown], replicas: Sequence[Shown], names: Sequence[str]) -> str:
    """As `pictures`, on one time scale: those `above`, and the one of `replicas` that is chosen; `names` of both in turn."""
    longest = max(one.step_seconds for one in (*above, *replicas))
    still = [_picture([one], [name], longest) for one, name in zip(above, names)]
    to_choose = [_picture([one], [name], longest) for one, name in zip(replicas, names[len(above) :], strict=True)]
    # A pattern in a picture that is hidden is drawn nowhere.
    patterns = f'<svg width="0" height="0" aria-hidden="true">{HATCH}</svg>'
    return patterns + _scrolled(*still, *map(of_replica, range(len(replicas)), to_choose))


def _picture(shown: Sequence[Shown], names: Sequence[str], longest: float) -> str:
    return svg(*shown, width=_WIDTH, names=names, seconds=longest) + "\n".join(_curves(shown, names, longest))


def _curves(shown: Sequence[Shown], names: Sequence[str], longest: float) -> list[str]:
    return [
        heading(f"{name} · {held_words(one)}") + memory_curves(one, width=_WIDTH, longest=longest)
        for one, name in zip(shown, names, strict=True)
    ]


def _scrolled(*drawn: str) -> str:
    zoom = '<label id="zoom">Stretch the time axis <input type="range" min="0" value="0" step="any"></label>'
    return "\n".join([zoom, '<div class="scroll">', *drawn, "</div>"])


def choice_of_replica(words: Sequence[str], chosen: int) -> str:
    """What lets the reader choose a replica: `words` are what each is called. Without a script all are there, below each other."""
    options = "".join(
        f'<option value="{number}"{" selected" if number == chosen else ""}>{escape(text)}</option>'
        for number, text in enumerate(words)
    )
    return f'<label id="choice">Replica <select autocomplete="off">{options}</select></label>'


def of_replica(replica: int, *parts: str) -> str:
    """HTML that is there while this replica is chosen."""
    return f'<div data-replica="{replica}">' + "\n".join(parts) + "</div>"


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
    return f"{words}, in which the next op had all its inputs and could not run yet; most on {one.rank_name(worst)}, {number(exposed[worst])} s."


def rank_numbers(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """For each step a table with a line per rank, and what its columns mean."""
    tables = [
        heading(f"{name} · seconds per rank") + framed(ranks_table(one.breakdown))
        for one, name in zip(shown, names, strict=True)
    ]
    meanings = {
        "busy": "the rank computed; all columns up to unexplained add up to the step",
        **causes([rank for one in shown for rank in one.breakdown]),
        "R hidden": "recomputation that cost no time: the rank would have waited",
        "R exposed": "recomputation for which the next op had to wait",
        "peak sets": "sets of activations alive at once",
    }
    return "\n".join([*tables, _list(meanings.items())])


def _list(meanings: Iterable[tuple[str, str]]) -> str:
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in meanings)
    return f"<dl>{entries}</dl>"
