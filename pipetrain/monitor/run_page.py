"""timeline.html, the page of a run: the step that was predicted above the one that was measured, and where their time went."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.monitor.draw.page import (
    framed,
    heading,
    page,
    paragraph,
    pictures,
    rank_numbers,
    recomputation,
    schedules_table,
)
from pipetrain.monitor.draw.table import Table
from pipetrain.monitor.report import RunReport, in_a_line, remarks, report_parts
from pipetrain.monitor.residuals import residuals
from pipetrain.monitor.shown import Shown


def run_page(
    report: RunReport,
    measured: Sequence[Shown],
    predicted: Shown | None,
    *,
    predicted_from: range,
    clock_error_seconds: float,
) -> str:
    """HTML; `measured` are the replicas. `predicted_from`: the steps whose op times `predicted` has; `clock_error_seconds`: between
    the ranks of `measured`."""
    above, names = [], []
    if predicted is not None:
        first, last = predicted_from.start, predicted_from.stop - 1
        above, names = [predicted], [f"Predicted from the op times of steps {first} to {last}"]
    name, slowest = f"Measured, step {report.steps}", slowest_of(measured)
    for replica in range(len(measured)):
        last_of = ", the last to end" if replica == slowest else ""
        names.append(f"{name}, replica {replica}{last_of}" if len(measured) > 1 else name)
    shown = [*above, *measured]
    return page(
        report.experiment,
        heading(f"{report.experiment}: {measured[0].title}", level=1),
        paragraph(in_a_line(report)),
        pictures(shown, names),
        recomputation(shown, names),
        heading("The whole run"),
        *(paragraph(part) if isinstance(part, str) else framed(part) for part in report_parts(report)),
        *map(paragraph, remarks(report)),
        heading("The steps drawn above"),
        framed(schedules_table(shown, names)),
        rank_numbers(shown, names),
        *([] if predicted is None else _against(predicted, measured)),
        paragraph(f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds."),
    )


def slowest_of(measured: Sequence[Shown]) -> int:
    """The replica whose last op ended last: it is what the others wait for in the end."""
    return max(range(len(measured)), key=lambda replica: measured[replica].timeline.last_op_end)


def _against(predicted: Shown, measured: Sequence[Shown]) -> list[str]:
    """What each kind of op took more or less than predicted, over all replicas."""
    caption = (
        "Means over the ops of a kind, in milliseconds; a hop counts as its receive. Residual: measured - predicted."
    )
    rows = []
    for one in residuals(predicted.timeline, *(each.timeline for each in measured)):
        share = f"{one.residual_seconds / one.predicted_seconds:+.1%}" if one.predicted_seconds > 0 else "-"
        numbers = (one.predicted_seconds, one.measured_seconds, one.residual_seconds)
        rows.append([one.kind.value, str(one.num_ops), *(f"{seconds * 1e3:.3f}" for seconds in numbers), share])
    head = ["op", "number", "predicted ms", "measured ms", "residual ms", "residual"]
    return [heading("Kinds of op, measured against predicted"), paragraph(caption), framed(Table(head, rows))]
