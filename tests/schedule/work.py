"""How much work a function does with a schedule, counted: seconds would be those of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pipetrain.schedule.schedule import Schedule


def calls_per_op(schedule: Schedule, function: Callable[[Schedule], Any]) -> float:
    """Calls, those of builtins too, that `function(schedule)` makes per op of all lanes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(schedule)
    finally:
        sys.setprofile(before)
    return calls / sum(len(ops) for rank in schedule.lanes for ops in rank.values())
