"""Timelines and losses as pictures for those who cannot show our SVG, or want another format. Drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from pipetrain.timeline.draw.palette import looks_of
from pipetrain.timeline.shown import Shown

Curve = tuple[Sequence[int], Sequence[float]]  # steps, losses


def timeline_png(pictures: Sequence[Shown]) -> bytes:
    """Schedules below each other on one time scale: a row per rank, a box per op."""
    figure = _figure(12.0, sum(0.6 + 0.35 * one.schedule.num_ranks for one in pictures) + 0.5)
    axes = figure.subplots(len(pictures), 1, squeeze=False)[:, 0]
    for one, axis in zip(pictures, axes):
        _draw(one, axis)
        axis.set_xlim(0, max(each.step_seconds for each in pictures))
    axes[-1].set_xlabel("seconds")
    return _saved(figure, "png")


def loss_plot(curves: Mapping[str, Curve], file_format: str) -> bytes:
    """Losses over steps, a curve per name; `file_format` is `png` or `svg`."""
    figure = _figure(9.0, 5.0)
    axis = figure.subplots()
    for name, (steps, losses) in curves.items():
        axis.plot(steps, losses, label=name, linewidth=1.2)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return _saved(figure, file_format)


def _draw(one: Shown, axis: Any) -> None:
    start = one.start
    for rank in range(one.schedule.num_ranks):
        events = [event for event in one.timeline.of_rank(rank) if event.op.kind.computes]
        spans = [(event.start - start, event.end - event.start) for event in events]
        axis.broken_barh(spans, (rank - 0.4, 0.8), facecolors=[looks_of(event.op.kind).fill for event in events])
    axis.set_yticks(range(one.schedule.num_ranks), [one.rank_name(rank) for rank in range(one.schedule.num_ranks)])
    axis.invert_yaxis()
    axis.set_title(f"{one.title}: step {one.step_seconds:.4g} s, bubble {one.bubble_fraction:.0%}", loc="left", size=10)


def _figure(width: float, height: float) -> Any:
    """A figure of its own, without pyplot, which would keep it and look for a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _saved(figure: Any, file_format: str) -> bytes:
    target = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else {}  # the same picture, the same file
    figure.savefig(target, format=file_format, dpi=120, metadata=metadata)
    return target.getvalue()
