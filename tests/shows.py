"""A simulated schedule from the arguments of `make_schedule`, in one call."""

from __future__ import annotations

from typing import Any

from pipetrain.monitor.shown import Shown, show_schedule
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule


def show(family: Any = "gpipe", *, num_stages: int, costs: Costs | None = None, **wanted: Any) -> Shown:
    """The schedule that `wanted` describes; with the same costs it is made and simulated."""
    return show_schedule(make_schedule(family, num_stages=num_stages, costs=costs, **wanted), costs)
