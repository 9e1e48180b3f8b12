"""Pages that open anywhere: one file each, with its style, its script and what that draws.

`page` is their frame, `html` the page of schedules before they run, and `run_page` timeline.html, that of a run: the step that was
predicted above one that was measured, and where their time went. timeline.js draws plain values: panels, one per step or schedule, and
figures over steps. Times in them are seconds from the start of the panel's step, rounded to 0.1 microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from pipetrain.config.read_files import fitted
from pipetrain.config.terminal import printable
from pipetrain.monitor.breakdown import RankBreakdown, bytes_over_time, sets_over_time
from pipetrain.monitor.draw.palette import LOOKS
from pipetrain.monitor.draw.table import Table, number, size
from pipetrain.monitor.draw.terminal import MeshShown, mesh_grid, mesh_notes, mesh_table
from pipetrain.monitor.report import RunReport, in_a_line, most, remarks, report_parts
from pipetrain.monitor.shown import Shown
from pipetrain.schedule.events import ran_beside
from pipetrain.schedule.op import Kind, Lane

_HERE = Path(__file__).parent
_READY = "has all that its next op needs"
_COPY = "a set to come back from host memory, or for the copy that frees a place"
_MACHINE = "its machine runs others or another thread holds Python's lock"
# Of each cause of the bubble: the head of its column, the field of the breakdown, what the rank does meanwhile.
_CAUSES = {
    "fill": ("fill_seconds", "has not started its first op"),
    "drain": ("drain_seconds", "has ended its last op"),
    "reduce": ("reduce_exposed_seconds", "adds up gradients after the last op of any rank"),
    "wait F": ("wait_activation_seconds", "waits for an activation of the stage before"),
    "wait B": ("wait_gradient_seconds", "waits for a gradient of the stage after"),
    "copy": ("wait_copy_seconds", f"waits for {_COPY}"),
    "imbalance": ("imbalance_seconds", "has less work than the busiest rank, which no order avoids"),
    "host": ("host_seconds", f"{_READY}, and is on the way to it"),
    "hand-over": ("handover_seconds", f"{_READY}, and the thread that computes has not been woken yet"),
    "machine": ("machine_seconds", f"{_READY}, and is not run, as {_MACHINE}"),
    "unexplained": ("unexplained_seconds", f"{_READY}, and runs nothing"),
}
_LANES = list(Lane)
Panel = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, sentences, tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()

    def as_html(self) -> str:
        return "\n".join([heading(self.title), *map(paragraph, self.text), *(table.as_html() for table in self.tables)])


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
    report: RunReport, shown: Sequence[Shown], names: Sequence[str], clock_error_seconds: float
) -> list[Section]:
    """What stands below the drawing of a run that is over. `names`: of the steps that are `shown`."""
    parts = report_parts(report)
    clocks = f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds."
    text = (in_a_line(report), *(part for part in parts if isinstance(part, str)), *remarks(report), clocks)
    tables = tuple(part for part in parts if isinstance(part, Table))
    return [Section("The whole run", text, tables), *rank_numbers(shown, names)]


def slowest_of(measured: Sequence[Shown]) -> int:
    """The replica whose last op ended last: it is what the others wait for in the end."""
    return max(range(len(measured)), key=lambda replica: measured[replica].timeline.last_op_end)


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(printable(text))}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(printable(text))}</p>"


def mesh_html(shown: MeshShown) -> str:
    """Part of a page."""
    drawn = f"<pre>{escape(mesh_grid(shown.mesh))}</pre>"
    notes = map(paragraph, mesh_notes(shown))
    return "\n".join([heading(shown.title), drawn, mesh_table(shown.mesh).as_html(), *notes])


def tables_html(sections: Iterable[Section]) -> str:
    """The part of a page that stands below the drawing."""
    return f'<div id="tables">{"".join(section.as_html() for section in sections)}</div>'


def drawing(data: str, picker: str = "recorded step") -> str:
    """The part that timeline.js fills from `data`, the text of `drawing_data`. `picker`: what the list of steps is called."""
    return Template((_HERE / "timeline.html").read_text()).substitute(data=data, picker=picker)


def rank_numbers(shown: Sequence[Shown], names: Sequence[str]) -> list[Section]:
    """For each step a table with a line per rank; what the columns mean stands below the last."""
    tables = [ranks_table(one.breakdown) for one in shown]
    tables[:-1] = [replace(table, words=()) for table in tables[:-1]]
    return [Section(f"{name} · seconds per rank", tables=(table,)) for name, table in zip(names, tables, strict=True)]


def schedules_table(shown: Sequence[Shown]) -> Table:
    """A line per schedule: step, bound and bubble, R hidden and exposed (summed over ranks), most sets; and where the costs say
    them, most sets with the stashed inputs counted as the part of a set that they are, and most bytes."""
    columns = {
        "schedule": [one.title for one in shown],
        "step s": [number(one.step_seconds) for one in shown],
        "bound s": [number(one.bound_seconds) for one in shown],
        "bubble": [number(one.bubble_fraction, "{:.1%}") for one in shown],
        "R hidden s": [number(one.hidden_seconds) for one in shown],
        "R exposed s": [number(one.exposed_seconds) for one in shown],
        "peak sets": [number(max(rank.peak_sets for rank in one.breakdown)) for one in shown],
        "with inputs": [number(most(one.peak_sets_with_inputs()), "{:.3g}") for one in shown],
        "peak bytes": [size(most(one.peak_bytes())) for one in shown],
    }
    known = {head: cells for head, cells in columns.items() if set(cells) != {"-"}}
    return Table(
        tuple(known), list(zip(*known.values())), words=[(name, _SCHEDULE_WORDS[name]) for name in list(known)[1:]]
    )


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


_RARE = ("reduce", "copy", "host", "hand-over", "machine")  # causes that have a column only if they occur


def ranks_table(breakdown: Sequence[RankBreakdown]) -> Table:
    """A line per rank: busy seconds, the bubble by cause, R hidden and exposed, most sets alive."""
    least = [1e-12 * (rank.busy_seconds + rank.bubble_seconds) for rank in breakdown]  # less is an error of rounding
    causes = {
        head: [seconds if (seconds := getattr(rank, field)) > few else 0.0 for rank, few in zip(breakdown, least)]
        for head, (field, _) in _CAUSES.items()
    }
    columns = {
        "busy": [rank.busy_seconds for rank in breakdown],
        **{head: seconds for head, seconds in causes.items() if any(seconds) or head not in _RARE},
        "R hidden": [rank.recompute_hidden_seconds for rank in breakdown],
        "R exposed": [rank.recompute_exposed_seconds for rank in breakdown],
        "peak sets": [rank.peak_sets for rank in breakdown],
    }
    words = {
        "busy": "The rank computes. All columns up to unexplained add up to the step.",
        **{head: f"The rank {words}." for head, (_, words) in _CAUSES.items() if head in columns},
        "R hidden": "Recomputation that cost no time: the rank would have waited.",
        "R exposed": "Recomputation for which the next op had to wait.",
        "peak sets": "Most sets of activations alive at once.",
    }
    rows = zip(*(map(number, column) for column in columns.values()))
    return Table(
        ("rank", *columns),
        [(str(rank.rank), *row) for rank, row in zip(breakdown, rows)],
        words=list(words.items()),
    )


# What timeline.js draws --------------------------------------------------------------------------------------------


def panel_of(one: Shown, name: str, *, peak: Sequence[float | None] = (), limit: Sequence[float | None] = ()) -> Panel:
    """One schedule or step. `peak`: bytes of activations measured per rank; `limit`: bytes that its device has."""
    schedule, costs = one.schedule, one.costs
    of_rank = [one.timeline.of_rank(rank) for rank in range(schedule.num_ranks)]
    in_bytes = bool(costs.set_bytes and costs.input_bytes)
    held = [
        bytes_over_time(schedule, events, costs) if in_bytes else sets_over_time(schedule, events) for events in of_rank
    ]
    fields = ["busy_seconds", *(field for field, _ in _CAUSES.values())]

    def at(moment: float) -> float:
        return _rounded(moment - one.start)

    return {
        "name": name,
        "facts": one.facts,
        "seconds": _rounded(one.step_seconds),
        "ranks": [one.rank_name(rank) for rank in range(schedule.num_ranks)],
        "rank_stages": [one.stages_of(rank) for rank in range(schedule.num_ranks)],
        "beside": any(ran_beside(event for event in events if event.op.kind.computes) for events in of_rank),
        "ops": [
            [event.rank, _LANES.index(event.lane), str(event.op), at(event.start), _rounded(event.end - event.start)]
            for events in of_rank
            for event in events
        ],
        "exposed": [
            [rank, at(begin), at(end)] for rank in range(schedule.num_ranks) for begin, end in one.exposed(rank)
        ],
        "parts": [[_rounded(getattr(rank, field)) for field in fields] for rank in one.breakdown],
        # Changes at one moment count as one: a set that takes another's place.
        "held": [[[at(time), amount] for time, amount in dict(curve).items()] for curve in held],
        "bytes": in_bytes,
        "input": list(costs.input_bytes) if in_bytes else [],
        "set": list(costs.set_bytes) if in_bytes else [],
        "peak": list(peak),
        "limit": list(limit) if any(limit) else [],
    }


def charts_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures over steps, from lines of metrics.jsonl; what is no finite number is None."""
    keys = {"loss": "loss", "tokens per second": "tokens_per_second", "bubble": "bubble_fraction"}
    return {
        "steps": [_finite(line["step"]) for line in lines],
        "lines": [
            {"name": name, "values": [_finite(line.get(key)) for line in lines], "percent": name == "bubble"}
            for name, key in keys.items()
        ],
    }


def drawing_data(
    fixed: Sequence[Panel], steps: Sequence[Mapping[str, Any]] = (), *, stages: Sequence[str] = (), charts: Any = None
) -> str:
    """The JSON for a page, safe inside of a `script` element. `fixed` panels are always drawn; of `steps` the user picks one."""
    values = {
        "kinds": {
            kind.value: {"word": looks.word, "fill": looks.fill, "ink": looks.ink}
            for kind in Kind
            if (looks := LOOKS.get(kind.row.looks or "")) is not None
        },
        "causes": [{"name": name, "words": words} for name, (_, words) in _CAUSES.items()],
        "fixed": list(fixed),
        "steps": list(steps),
        "stages": list(stages),
        "charts": charts or charts_of(()),
    }
    # ASCII alone, and no character that could end the element; JSON has no other place for them than strings.
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(seconds: float) -> float:
    return round(seconds, 7)


def _finite(value: Any) -> float | None:
    """None: no number, or none that can be drawn."""
    is_drawn = math.isfinite(value) if isinstance(value, float) else isinstance(value, int) and abs(value) < 2**63
    return value if is_drawn else None
