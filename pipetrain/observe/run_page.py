"""timeline.html, the page of a run: the step that was predicted above the one that was measured, and where their time went."""

from __future__ import annotations

from pipetrain.observe.report import RunReport, in_a_line, rank_totals, remarks, totals
from pipetrain.timeline.draw.page import (
    framed,
    heading,
    page,
    paragraph,
    pictures,
    rank_numbers,
    recomputation,
)
from pipetrain.timeline.draw.rank_table import schedules_table
from pipetrain.timeline.draw.table import Table
from pipetrain.timeline.residuals import residuals
from pipetrain.timeline.shown import Shown


def run_page(
    report: RunReport, measured: Shown, predicted: Shown | None, *, predicted_from: range, clock_error_seconds: float
) -> str:
    """HTML. `predicted_from`: the steps whose op times `predicted` has; `clock_error_seconds`: between the ranks of `measured`."""
    shown, names = [measured], [f"Measured, step {report.steps}"]
    if predicted is not None:
        first, last = predicted_from.start, predicted_from.stop - 1
        shown, names = [predicted, measured], [f"Predicted from the op times of steps {first} to {last}", *names]
    return page(
        report.experiment,
        heading(f"{report.experiment}: {measured.title}", level=1),
        paragraph(in_a_line(report)),
        pictures(shown, names),
        recomputation(shown, names),
        heading("The whole run"),
        framed(totals(report)),
        framed(rank_totals(report)),
        *map(paragraph, remarks(report)),
        heading("The steps drawn above"),
        framed(schedules_table(shown, names)),
        rank_numbers(shown, names),
        "" if predicted is None else _residuals(measured, predicted),
        paragraph(f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds."),
    )


def _residuals(measured: Shown, predicted: Shown) -> str:
    caption = (
        "Means over the ops of a kind, in milliseconds; a hop counts as its receive. Residual: measured - predicted."
    )
    return (
        heading("Kinds of op, measured against predicted")
        + paragraph(caption)
        + framed(_residual_table(measured, predicted))
    )


def _residual_table(measured: Shown, predicted: Shown) -> Table:
    """A line per kind of op that both steps have."""
    rows = []
    for one in residuals(predicted.timeline, measured.timeline):
        share = f"{one.residual_seconds / one.predicted_seconds:+.1%}" if one.predicted_seconds > 0 else "-"
        numbers = (one.predicted_seconds, one.measured_seconds, one.residual_seconds)
        milliseconds = [f"{seconds * 1e3:.3f}" for seconds in numbers]
        rows.append([one.kind.value, str(one.num_ops), *milliseconds, share])
    return Table(["op", "number", "predicted ms", "measured ms", "residual ms", "residual"], rows)
