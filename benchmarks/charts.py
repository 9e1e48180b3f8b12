"""Plots of results: bars per system, lines over a quantity. Needs matplotlib, which is loaded when something is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, PEER_WITH, PEER_WITHOUT = "#1b6e8c", "#d98c5f", "#b9b9b9"


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    low: float
    high: float
    colour: str


@dataclass(frozen=True)
class Panel:
    """One plot of bars; `marks` are vertical lines with a name."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    marks: Mapping[str, float]


def draw_bars(path: Path, panels: Sequence[Panel]) -> None:
    """Panels side by side; the whisker is the fastest and slowest round."""
    plt = _pyplot()
    most = max(len(panel.bars) for panel in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 0.9 + 0.27 * most), squeeze=False)
    for axis, panel in zip(axes[0], panels):
        bars = panel.bars[::-1]
        places = range(len(bars))
        values = [bar.value for bar in bars]
        whiskers = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
        axis.barh(places, values, color=[bar.colour for bar in bars], xerr=whiskers, ecolor="#444444", height=0.72)
        axis.set_yticks(places, [bar.name for bar in bars], fontsize=8)
        for style, (name, value) in zip(("--", ":", "-."), panel.marks.items()):
            axis.axvline(value, linestyle=style, color="black", linewidth=1, label=name)
        axis.set_xlabel(panel.unit, fontsize=8)
        axis.set_title(panel.title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        if panel.marks:
            axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    _save(plt, figure, path)


def draw_points(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log: bool = False,
) -> None:
    """A line with points per series."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.2, 4.0))
    for name, points in series.items():
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", linewidth=1.2, markersize=5, label=name)
    if log:
        axis.set_xscale("log")
        axis.set_yscale("log")
    axis.set_xlabel(x_name, fontsize=9)
    axis.set_ylabel(y_name, fontsize=9)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7)
    _save(plt, figure, path)


def _pyplot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
