"""timeline.html, the page of a run: the step that was predicted above the one that was measured, and where their time went."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.observe.report import (
    RunReport,
    in_a_line,
    of_the_last_phase,
    phase_totals,
    rank_totals,
    remarks,
    totals,
)
from pipetrain.timeline.draw.page import (
    choice_of_replica,
    framed,
    heading,
    of_replica,
    page,
    paragraph,
    pictures,
    pictures_of_replicas,
    rank_numbers,
    recomputation,
)
from pipetrain.timeline.draw.rank_table import schedules_table
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
    title = heading(f"{report.experiment}: {measured[0].title}", level=1)
    if len(measured) == 1:
        shown, names = [*above, measured[0]], [*names_above, name]
        drawn = [pictures(shown, names), recomputation(shown, names)]
        numbers = [_numbers(measured[0], predicted, shown, names)]
    else:
        calls = [f"{name}, replica {number}" for number in range(len(measured))]
        pairs = [([*above, one], [*names_above, call]) for one, call in zip(measured, calls)]
        drawn = [
            choice_of_replica(_words(measured), slowest_of(measured)),
            pictures_of_replicas(above, measured, [*names_above, *calls]),
            *(of_replica(number, recomputation(*pair)) for number, pair in enumerate(pairs)),
        ]
        numbers = [
            of_replica(number, _numbers(measured[number], predicted, *pair)) for number, pair in enumerate(pairs)
        ]
    return page(
        report.experiment,
        title,
        paragraph(in_a_line(report)),
        *drawn,
        heading("The whole run"),
        framed(totals(report)),
        framed(rank_totals(report)),
        *map(paragraph, remarks(report)),
        *(
            [heading("The phases"), paragraph(of_the_last_phase(report)), framed(phase_totals(report))]
            if report.phases
            else []
        ),
        *numbers,
        paragraph(f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds."),
    )


def slowest_of(measured: Sequence[Shown]) -> int:
    """The replica whose last op ended last: it is what the others wait for in the end."""
    return max(range(len(measured)), key=lambda replica: measured[replica].timeline.last_op_end)


def _words(measured: Sequence[Shown]) -> list[str]:
    """What each replica is called where one is chosen."""
    slowest = slowest_of(measured)
    return [
        f"{number}: ranks {' '.join(str(where.rank) for where in one.ranks)}, last op ended at "
        f"{one.timeline.last_op_end - one.start:.4g} s{' (the last)' if number == slowest else ''}"
        for number, one in enumerate(measured)
    ]


def _numbers(measured: Shown, predicted: Shown | None, shown: Sequence[Shown], names: Sequence[str]) -> str:
    parts = [
        heading("The steps drawn above"),
        framed(schedules_table(shown, names)),
        rank_numbers(shown, names),
        "" if predicted is None else _residuals(measured, predicted),
    ]
    return "\n".join(parts)


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
