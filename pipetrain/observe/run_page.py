"""timeline.html, the page of a run: the step that was predicted above the one that was measured, and where their time went."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pipetrain.observe.report import RunReport, in_a_line, remarks, report_parts
from pipetrain.timeline.draw.page import (
    framed,
    heading,
    page,
    paragraph,
    picture,
    pictures,
    rank_numbers,
    recomputation,
    schedules_table,
    scrolled,
)
from pipetrain.timeline.draw.svg import HATCH
from pipetrain.timeline.draw.table import Table
from pipetrain.timeline.residuals import residuals
from pipetrain.timeline.shown import Shown


def run_page(
    report: RunReport,
    measured: Sequence[Shown],
    predicted: Shown | None,
    *,
    predicted_from: range,
    clock_error_seconds: float,
) -> str:
    """HTML; `measured` are the replicas, of which the reader sees one at a time. `predicted_from`: the steps whose op times `predicted`
    has; `clock_error_seconds`: between the ranks of `measured`."""
    above, names_above = [], []
    if predicted is not None:
        first, last = predicted_from.start, predicted_from.stop - 1
        above, names_above = [predicted], [f"Predicted from the op times of steps {first} to {last}"]
    name = f"Measured, step {report.steps}"
    calls = [f"{name}, replica {number}" for number in range(len(measured))] if len(measured) > 1 else [name]
    pairs = [([*above, one], [*names_above, call]) for one, call in zip(measured, calls)]
    numbers = [_numbers(one, predicted, *pair) for one, pair in zip(measured, pairs)]
    if len(measured) == 1:
        drawn = [pictures(*pairs[0]), recomputation(*pairs[0])]
    else:
        longest = max(one.step_seconds for one in (*above, *measured))
        still = [picture([one], [name], longest) for one, name in zip(above, names_above)]
        to_choose = [picture([one], [call], longest) for one, call in zip(measured, calls)]
        drawn = [
            _choice_of_replica(measured),
            # A pattern in a picture that is hidden is drawn nowhere.
            f'<svg width="0" height="0" aria-hidden="true">{HATCH}</svg>',
            scrolled(*still, *map(_of_replica, range(len(measured)), to_choose)),
            *(_of_replica(number, recomputation(*pair)) for number, pair in enumerate(pairs)),
        ]
        numbers = [_of_replica(replica, part) for replica, part in enumerate(numbers)]
    return page(
        report.experiment,
        heading(f"{report.experiment}: {measured[0].title}", level=1),
        paragraph(in_a_line(report)),
        *drawn,
        heading("The whole run"),
        *(paragraph(part) if isinstance(part, str) else framed(part) for part in report_parts(report)),
        *map(paragraph, remarks(report)),
        *numbers,
        paragraph(f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds."),
    )


def slowest_of(measured: Sequence[Shown]) -> int:
    """The replica whose last op ended last: it is what the others wait for in the end."""
    return max(range(len(measured)), key=lambda replica: measured[replica].timeline.last_op_end)


def _choice_of_replica(measured: Sequence[Shown]) -> str:
    """What lets the reader choose a replica. Without a script all are there, below each other."""
    slowest, options = slowest_of(measured), ""
    for number, one in enumerate(measured):
        words = (
            f"{number}: ranks {' '.join(str(where.rank) for where in one.ranks)}, last op ended at "
            f"{one.timeline.last_op_end - one.start:.4g} s{' (the last)' if number == slowest else ''}"
        )
        options += f'<option value="{number}"{" selected" if number == slowest else ""}>{escape(words)}</option>'
    return f'<label id="choice">Replica <select autocomplete="off">{options}</select></label>'


def _of_replica(replica: int, part: str) -> str:
    """HTML that is there while this replica is chosen."""
    return f'<div data-replica="{replica}">{part}</div>'


def _numbers(measured: Shown, predicted: Shown | None, shown: Sequence[Shown], names: Sequence[str]) -> str:
    parts = [heading("The steps drawn above"), framed(schedules_table(shown, names)), rank_numbers(shown, names)]
    if predicted is not None:
        caption = "Means over the ops of a kind, in milliseconds; a hop counts as its receive. Residual: measured - predicted."
        parts.append(heading("Kinds of op, measured against predicted") + paragraph(caption))
        rows = []
        for one in residuals(predicted.timeline, measured.timeline):
            share = f"{one.residual_seconds / one.predicted_seconds:+.1%}" if one.predicted_seconds > 0 else "-"
            numbers = (one.predicted_seconds, one.measured_seconds, one.residual_seconds)
            rows.append([one.kind.value, str(one.num_ops), *(f"{seconds * 1e3:.3f}" for seconds in numbers), share])
        head = ["op", "number", "predicted ms", "measured ms", "residual ms", "residual"]
        parts.append(framed(Table(head, rows)))
    return "\n".join(parts)
