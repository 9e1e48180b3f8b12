"""Steps in numbers: schedules beside each other, and where the time of each rank went."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.timeline.breakdown import RankBreakdown
from pipetrain.timeline.draw.table import Table, number
from pipetrain.timeline.shown import Shown

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


def schedules_table(shown: Sequence[Shown], names: Sequence[str] = ()) -> Table:
    """A line per schedule: step, bound and bubble, R hidden and exposed (summed over ranks), most sets; and where the costs say
    them, most sets with the stashed inputs counted as the part of a set that they are, and most bytes.

    `names`: what to call them, if not by their titles.
    """
    head = ["schedule", "step s", "bound s", "bubble", "R hidden s", "R exposed s", "peak sets"]
    rows = [[name, *_facts(one)] for name, one in zip(names or [one.title for one in shown], shown)]
    for column, held in (
        ("with inputs", [one.peak_sets_with_inputs() for one in shown]),
        ("peak bytes", [one.peak_bytes() for one in shown]),
    ):
        if any(ranks is not None for ranks in held):
            head.append(column)
            for row, ranks in zip(rows, held):
                row.append(number(None if ranks is None else max(ranks), "{:.3g}"))
    return Table(head, rows)


def _facts(one: Shown) -> list[str]:
    return [
        number(one.step_seconds),
        number(one.bound_seconds),
        number(one.bubble_fraction, "{:.1%}"),
        number(sum(rank.recompute_hidden_seconds for rank in one.breakdown)),
        number(sum(rank.recompute_exposed_seconds for rank in one.breakdown)),
        number(max(rank.peak_sets for rank in one.breakdown)),
    ]


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


def causes(breakdown: Sequence[RankBreakdown]) -> dict[str, str]:
    """What the columns between `busy` and `R hidden` count: the bubble, by why nothing ran."""
    return {head: words for head, (_, words) in _causes_in(breakdown).items()}


def _causes_in(breakdown: Sequence[RankBreakdown]) -> dict[str, tuple[str, str]]:
    """All, but where no step ended with gradients that were added up, not that one."""
    reduces = any(rank.reduce_exposed_seconds > 0 for rank in breakdown)
    return {head: cause for head, cause in _CAUSES.items() if head != "reduce" or reduces}
