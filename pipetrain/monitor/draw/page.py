"""Pages that open anywhere: one file each, with its style, its script and what that draws.

`page` is their frame, `html` the page of schedules before they run, and `run_page` timeline.html, that of a run: the step that was
predicted above one that was measured, and where their time went.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from pipetrain.config.read_files import fitted
from pipetrain.config.terminal import printable
from pipetrain.monitor.breakdown import RankBreakdown
from pipetrain.monitor.draw.drawing import CAUSES, drawing_data, panel_of
from pipetrain.monitor.draw.table import Table, number, size
from pipetrain.monitor.draw.terminal import MeshShown, mesh_grid, mesh_notes, mesh_table
from pipetrain.monitor.report import RunReport, in_a_line, remarks, report_parts
from pipetrain.monitor.residuals import residuals
from pipetrain.monitor.shown import Shown

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, sentences, tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()

    def as_html(self) -> str:
        return "\n".join([heading(self.title), *map(paragraph, self.text), *map(framed, self.tables)])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tables": [{**asdict(table), "left": sorted(table.left)} for table in self.tables]}


def page(title: str, *parts: str, live: bool = False) -> str:
    """The frame: `parts` are HTML, below each other. `live`: the script asks for the page again while the run goes on."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(printable(title))}</title><style>{(_HERE / "timeline.css").read_text()}</style></head><body{' data-live="1"' if live else ""}>
{chr(10).join(parts)}
<script>{(_HERE / "timeline.js").read_text()}</script></body></html>
"""


def html(*shown: Shown, above: Sequence[str] = (), others: Mapping[str, Shown] | None = None) -> str:
    """The page for one schedule, or for several on one time scale, below what is HTML already. `others`, by name: of which the reader picks one."""
    names = [one.title for one in shown]
    panels = [panel_of(one, name) for one, name in zip(shown, names)]
    picked = [
        {"step": number, "panels": [panel_of(one, name)]} for number, (name, one) in enumerate((others or {}).items())
    ]
    sections = [
        Section("Where the recomputation went", recomputation(shown, names)),
        Section("Numbers", tables=(schedules_table(shown),)),
        *rank_numbers(shown, names),
    ]
    return page("; ".join(names), *above, drawing(drawing_data(panels, picked), "compare with"), tables_html(sections))


def run_page(values: Mapping[str, Any], charts: Any, *, above: Sequence[Section] = (), live: bool = False) -> str:
    """timeline.html from what timeline.json has (`monitor/recorded.py`) and the figures over steps (`charts_of`).

    Raises:
        ValueError, KeyError, TypeError: these are not the values of a page.
    """
    title = str(values["title"])
    data = drawing_data(values["fixed"], values["steps"], stages=values["stages"], charts=charts)
    sections = [*above, *(fitted(Section, one) for one in values["sections"])]
    return page(title, heading(title, level=1), drawing(data), tables_html(sections), live=live)


def run_sections(
    report: RunReport,
    measured: Sequence[Shown],
    names: Sequence[str],
    predicted: Shown | None,
    clock_error_seconds: float,
) -> list[Section]:
    """What stands below the drawing of a run that is over. `names`: of the predicted step, if there is one, and those measured."""
    shown = [*([] if predicted is None else [predicted]), *measured]
    clocks = f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds."
    return [
        report_section(report),
        Section("Where the recomputation went", recomputation(shown, names)),
        Section("The steps drawn above", (clocks,), (schedules_table(shown, names),)),
        *rank_numbers(shown, names),
        *([] if predicted is None else [_against(predicted, measured)]),
    ]


def report_section(report: RunReport) -> Section:
    """The report of the whole run."""
    parts = report_parts(report)
    text = (in_a_line(report), *(part for part in parts if isinstance(part, str)), *remarks(report))
    return Section("The whole run", text, tuple(part for part in parts if isinstance(part, Table)))


def slowest_of(measured: Sequence[Shown]) -> int:
    """The replica whose last op ended last: it is what the others wait for in the end."""
    return max(range(len(measured)), key=lambda replica: measured[replica].timeline.last_op_end)


def _against(predicted: Shown, measured: Sequence[Shown]) -> Section:
    """What each kind of op took more or less than predicted, over all replicas."""
    caption = "Means over the ops of a kind, in milliseconds; number is how many there are, and a hop counts as its receive. Residual: measured - predicted."
    rows = []
    for one in residuals(predicted.timeline, *(each.timeline for each in measured)):
        share = f"{one.residual_seconds / one.predicted_seconds:+.1%}" if one.predicted_seconds > 0 else "-"
        numbers = (one.predicted_seconds, one.measured_seconds, one.residual_seconds)
        rows.append([one.kind.value, str(one.num_ops), *(f"{seconds * 1e3:.3f}" for seconds in numbers), share])
    head = ["op", "number", "predicted ms", "measured ms", "residual ms", "residual"]
    return Section("Kinds of op, measured against predicted", (caption,), (Table(head, rows),))


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(printable(text))}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(printable(text))}</p>"


def framed(table: Table) -> str:
    """A table that scrolls where the window is narrower."""
    return f'<div class="table">{table.as_html()}</div>'


def mesh_html(shown: MeshShown) -> str:
    """Part of a page."""
    drawn = f"<pre>{escape(mesh_grid(shown.mesh))}</pre>"
    notes = map(paragraph, mesh_notes(shown))
    return "\n".join([heading(shown.title), drawn, framed(mesh_table(shown.mesh)), *notes])


def tables_html(sections: Iterable[Section]) -> str:
    """The part of a page that stands below the drawing."""
    return f'<div id="tables">{"".join(section.as_html() for section in sections)}</div>'


def drawing(data: str, picker: str = "recorded step") -> str:
    """The part that timeline.js fills from `data`, the text of `drawing_data`. `picker`: what the list of steps is called."""
    return f"""<div id="drawing">
<div class="tools"><span id="picker"><label>{picker} <select id="step" aria-label="{picker}"></select></label></span>
<span><button id="closer" aria-label="zoom in">+</button> <button id="farther" aria-label="zoom out">&minus;</button>
<button id="whole">whole step</button></span>
<label><input type="checkbox" id="lanes"> a row per lane</label>
<span class="tools" id="legend"></span></div>
<canvas id="steps" tabindex="0" role="img" aria-label="Ops of each rank over time; arrow keys choose an op, whose facts follow" aria-describedby="chosen"></canvas>
<p class="faint help">Click an op, or use the arrow keys: its facts stand here. Drag moves, Ctrl and wheel, double click or + and - zoom, 0 shows the whole step, [ and ]
pick another step. Paler boxes are of a later stage of the same rank.</p>
<div id="chosen" role="status" aria-live="polite"></div>
<h2>Memory per rank</h2><canvas id="memory" role="img" aria-label="What each rank holds over time" aria-describedby="memory-words"></canvas>
<p class="faint" id="memory-words"></p>
<h2>Busy and idle time, by cause</h2><p class="faint" id="bars-of"></p><div class="bars" id="bars"></div><div class="causes" id="causes"></div>
<div id="over"><h2>Over the steps</h2><div class="charts" id="charts"></div></div>
<div id="tip"></div></div>
<script type="application/json" id="data">{data}</script>"""


def recomputation(shown: Sequence[Shown], names: Sequence[str]) -> tuple[str, ...]:
    """Where the recomputation of each step went, in a sentence or three."""
    return tuple(f"{name}. {recompute_words(one)}" for one, name in zip(shown, names, strict=True))


def recompute_words(one: Shown) -> str:
    """How much of the recomputation was hidden, how much exposed, and on which rank most; seconds summed over ranks."""
    hidden, exposed = one.hidden_seconds, one.exposed_seconds
    if (total := hidden + exposed) <= 0:
        return "Nothing was recomputed."
    words = (
        f"Recomputation took {number(total)} s of all ranks. Hidden: {number(hidden)} s ({hidden / total:.0%}), in which the "
        f"rank would have waited. Exposed: {number(exposed)} s ({exposed / total:.0%})"
    )
    if exposed <= 0:
        return f"{words}: no op had to wait for it."
    most, worst = max((rank.recompute_exposed_seconds, -place) for place, rank in enumerate(one.breakdown))
    return f"{words}, in which the next op had all its inputs and could not run yet; most on {one.rank_name(-worst)}, {number(most)} s."


def rank_numbers(shown: Sequence[Shown], names: Sequence[str]) -> list[Section]:
    """For each step a table with a line per rank; what the columns mean stands below the last."""
    tables = [ranks_table(one.breakdown) for one in shown]
    tables[:-1] = [replace(table, words=()) for table in tables[:-1]]
    return [Section(f"{name} · seconds per rank", tables=(table,)) for name, table in zip(names, tables, strict=True)]


def schedules_table(shown: Sequence[Shown], names: Sequence[str] = ()) -> Table:
    """A line per schedule: step, bound and bubble, R hidden and exposed (summed over ranks), most sets; and where the costs say
    them, most sets with the stashed inputs counted as the part of a set that they are, and most bytes.

    `names`: what to call them, if not by their titles.
    """
    head = ["schedule", "step s", "bound s", "bubble", "R hidden s", "R exposed s", "peak sets"]
    rows = [
        [
            name,
            number(one.step_seconds),
            number(one.bound_seconds),
            number(one.bubble_fraction, "{:.1%}"),
            number(one.hidden_seconds),
            number(one.exposed_seconds),
            number(max(rank.peak_sets for rank in one.breakdown)),
        ]
        for name, one in zip(names or [one.title for one in shown], shown)
    ]
    for column, held in (
        ("with inputs", [one.peak_sets_with_inputs() for one in shown]),
        ("peak bytes", [one.peak_bytes() for one in shown]),
    ):
        if any(ranks is not None for ranks in held):
            head.append(column)
            for row, ranks in zip(rows, held):
                most = None if ranks is None else max(ranks)
                row.append(size(most) if column == "peak bytes" else number(most, "{:.3g}"))
    return Table(head, rows, words=[(name, _SCHEDULE_WORDS[name]) for name in head[1:]])


_SCHEDULE_WORDS = {
    "step s": "From the first op of any rank to the last.",
    "bound s": "The least that any order of these ops could take, as far as is proven.",
    "bubble": "Share of the step in which a rank computes nothing, over all ranks.",
    "R hidden s": "Recomputation that cost no time, summed over ranks.",
    "R exposed s": "Recomputation for which the next op had to wait, summed over ranks.",
    "peak sets": "Most sets of activations alive at once on any rank.",
    "with inputs": "The same, with stored inputs counted as the part of a set that they are.",
    "peak bytes": "Most bytes of sets and stored inputs at once on any rank.",
}


def ranks_table(breakdown: Sequence[RankBreakdown]) -> Table:
    """A line per rank: busy seconds, the bubble by cause, R hidden and exposed, most sets alive."""
    rare = ("reduce", "copy", "host", "hand-over", "machine")  # these only if they occur
    found = {head for head in rare if any(getattr(rank, CAUSES[head][0]) > 0 for rank in breakdown)}
    causes = {head: cause for head, cause in CAUSES.items() if head in found or head not in rare}
    head = ["rank", "busy", *causes, "R hidden", "R exposed", "peak sets"]
    rows = [
        [
            str(rank.rank),
            number(rank.busy_seconds),
            *(number(_or_zero(getattr(rank, field), rank)) for field, *_ in causes.values()),
            number(rank.recompute_hidden_seconds),
            number(rank.recompute_exposed_seconds),
            number(rank.peak_sets),
        ]
        for rank in breakdown
    ]
    return Table(
        head,
        rows,
        words=[
            ("busy", "The rank computes. All columns up to unexplained add up to the step."),
            *((head, f"The rank {words}.") for head, (_, words, *_) in causes.items()),
            ("R hidden", "Recomputation that cost no time: the rank would have waited."),
            ("R exposed", "Recomputation for which the next op had to wait."),
            ("peak sets", "Most sets of activations alive at once."),
        ],
    )


def _or_zero(seconds: float, rank: RankBreakdown) -> float:
    """`seconds`, or 0 for a rounding error."""
    return seconds if seconds > 1e-12 * (rank.busy_seconds + rank.bubble_seconds) else 0.0
