"""Pages that open anywhere: one file each, with its style and the script by which pictures answer to the pointer.

`page` is their frame, `html` the page of schedules before they run, and `run_page` timeline.html, that of a run: the step that was
predicted above the one that was measured, and where their time went.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pipetrain.monitor.breakdown import RankBreakdown
from pipetrain.monitor.draw.palette import LOOKS, THEME
from pipetrain.monitor.draw.svg import FONT, held_words, memory_curves, svg
from pipetrain.monitor.draw.table import Table, number
from pipetrain.monitor.report import RunReport, in_a_line, remarks, report_parts
from pipetrain.monitor.residuals import residuals
from pipetrain.monitor.shown import Shown

# Head of a column -> the field of the breakdown below it, and what it counts.
_CAUSES = {
    "fill": ("fill_seconds", "before the rank's first op"),
    "drain": ("drain_seconds", "after its last op"),
    "reduce": ("reduce_exposed_seconds", "after the last op of any rank, for its gradients to be added up"),
    "wait F": ("wait_activation_seconds", "for an activation from the stage before"),
    "wait B": ("wait_gradient_seconds", "for a gradient from the stage after"),
    "imbalance": ("imbalance_seconds", "waits that no order could avoid, because the busiest rank has more to do"),
    "unexplained": ("other_seconds", "an op had all that it waits for, and nothing ran"),
}
_WIDTH = 1160  # pixels


def page(title: str, *parts: str) -> str:
    """The frame: `parts` are HTML, below each other."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
{chr(10).join(parts)}
<div id="tip"></div><script>{_SCRIPT}</script></body></html>
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


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def framed(table: Table) -> str:
    """A table that scrolls where the window is narrower."""
    return f'<div class="table">{table.as_html()}</div>'


def pictures(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """The steps on one time scale, and below them what the ranks held on the same; they scroll where the window is narrower."""
    longest = max(one.step_seconds for one in shown)
    curves = [
        heading(f"{name} · {held_words(one)}") + memory_curves(one, width=_WIDTH, longest=longest)
        for one, name in zip(shown, names, strict=True)
    ]
    drawn = [svg(*shown, width=_WIDTH, names=names), *curves]
    return "\n".join(['<div class="scroll">', *drawn, "</div>"])


def recomputation(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """Where the recomputation of each step went, in a sentence or three."""
    meanings = [(name, recompute_words(one)) for one, name in zip(shown, names, strict=True)]
    return heading("Where the recomputation went") + _list(meanings)


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


def rank_numbers(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """For each step a table with a line per rank, and what its columns mean."""
    titles = [heading(f"{name} · seconds per rank") for name in names]
    tables = [title + framed(ranks_table(one.breakdown)) for one, title in zip(shown, titles, strict=True)]
    meanings = {
        "busy": "the rank computed; all columns up to unexplained add up to the step",
        **{head: words for head, (_, words) in _causes_in([rank for one in shown for rank in one.breakdown]).items()},
        "R hidden": "recomputation that cost no time: the rank would have waited",
        "R exposed": "recomputation for which the next op had to wait",
        "peak sets": "sets of activations alive at once",
    }
    return "\n".join([*tables, _list(meanings.items())])


def _list(meanings: Iterable[tuple[str, str]]) -> str:
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in meanings)
    return f"<dl>{entries}</dl>"


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
                row.append(number(None if ranks is None else max(ranks), "{:.3g}"))
    return Table(head, rows)


def ranks_table(breakdown: Sequence[RankBreakdown]) -> Table:
    """A line per rank: busy seconds, the bubble by cause, R hidden and exposed, most sets alive."""
    causes = _causes_in(breakdown)
    head = ["rank", "busy", *causes, "R hidden", "R exposed", "peak sets"]
    rows = [
        [
            str(rank.rank),
            number(rank.busy_seconds),
            *(number(getattr(rank, field)) for field, _ in causes.values()),
            number(rank.recompute_hidden_seconds),
            number(rank.recompute_exposed_seconds),
            number(rank.peak_sets),
        ]
        for rank in breakdown
    ]
    return Table(head, rows)


def _causes_in(breakdown: Sequence[RankBreakdown]) -> dict[str, tuple[str, str]]:
    """All, but where no step ended with gradients that were added up, not that one."""
    reduces = any(rank.reduce_exposed_seconds > 0 for rank in breakdown)
    return {head: cause for head, cause in _CAUSES.items() if head != "reduce" or reduces}


_STYLE = (
    """
  :root { color-scheme: light dark; font: 14px/1.5 $font; --faint: light-dark(#6e7781, #8d96a0); --line: #8c959f40 }
  body { max-width: 1400px; margin: 24px auto 64px; padding: 0 20px }
  h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 16px; margin: 32px 0 6px } p { margin: 4px 0; max-width: 90ch }
  .scroll { overflow-x: auto } .scroll > h2, .scroll > p { position: sticky; left: 0 }
  svg { display: block } .curve { fill: $fill; fill-opacity: .5; stroke: $fill }
  .op.faded { opacity: .18 }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 6px 0 }
  td, th { padding: 2px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
  th { font-weight: 500; color: var(--faint) } .left { text-align: left; padding-left: 0 }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 14px } dt { color: var(--faint) }
  dd { margin: 0; max-width: 90ch }
  .table { overflow-x: auto } pre { overflow-x: auto }
  #tip { position: fixed; display: none; padding: 4px 8px; border-radius: 4px; background: #24292f; color: #fff;
         pointer-events: none; white-space: pre }
""".replace("$font", FONT).replace("$fill", LOOKS["recompute"].fill)
    + THEME
)

# Names the op under the pointer and fades all that belongs to other microbatches.
_SCRIPT = """
  const tip = document.getElementById('tip'), ops = [...document.querySelectorAll('.op')];
  for (const op of ops) {
    const words = op.querySelector('title').textContent; op.querySelector('title').remove();
    op.addEventListener('pointerenter', () => {
      tip.textContent = words; tip.style.display = 'block';
      for (const one of ops) one.classList.toggle('faded', one.dataset.microbatch !== op.dataset.microbatch);
    });
    op.addEventListener('pointermove', move => {
      tip.style.left = Math.min(move.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
      tip.style.top = move.clientY + 16 + 'px';
    });
    op.addEventListener('pointerleave', () => {
      tip.style.display = 'none'; for (const one of ops) one.classList.remove('faded');
    });
  }
"""
