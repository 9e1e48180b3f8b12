"""Where the time of one step went, beside what was predicted: tables below the two pictures of a run's page."""

from __future__ import annotations

from pipetrain.timeline.draw.rank_table import aligned, ranks_table
from pipetrain.timeline.residuals import residuals
from pipetrain.timeline.shown import Shown


def explanation(measured: Shown, predicted: Shown | None, clock_error_seconds: float) -> str:
    """The bubble of each rank by its cause, predicted above measured, and per kind of op what it took more than predicted."""
    parts = [] if predicted is None else ["Predicted, seconds per rank", ranks_table(predicted.breakdown)]
    parts += ["Measured, seconds per rank", ranks_table(measured.breakdown)]
    if predicted is not None:
        parts += ["Residual per kind of op: measured - predicted", _residual_table(measured, predicted)]
    parts.append(
        f"The clocks of the ranks agree to within {clock_error_seconds * 1e6:.0f} microseconds. `unexplained` is time in which an op had all "
        "that it waits for and nothing ran."
    )
    return "\n\n".join(parts) + "\n"


def _residual_table(measured: Shown, predicted: Shown) -> str:
    head = ["op", "number", "predicted ms", "measured ms", "residual ms", "residual"]
    rows = []
    for one in residuals(predicted.timeline, measured.timeline):
        share = f"{one.residual_seconds / one.predicted_seconds:+.1%}" if one.predicted_seconds > 0 else "-"
        numbers = (one.predicted_seconds, one.measured_seconds, one.residual_seconds)
        milliseconds = [f"{seconds * 1e3:.3f}" for seconds in numbers]
        rows.append([one.kind.value, str(one.num_ops), *milliseconds, share])
    return aligned([head, *rows])
