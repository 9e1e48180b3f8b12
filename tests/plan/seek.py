"""Searches for the orders of `orders.json` again: `python tests/plan/seek.py SECONDS [part of a name ...]`, SECONDS for each.

It starts from the stored ones, and stores better ones. Orders that the rule alone makes are not stored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import ORDERS, Cell, cells

from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.make import make
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import CachedOrder, best_schedule, write_order
from pipetrain.schedule.simulate import simulate


def seek(cell: Cell, seconds: float, folder: Path) -> None:
    """Prints the step of the rule, that of the best order found, and what is proven; stores the order."""
    stored, spec = cell.spec.order, cell.unsolved
    if stored is not None:
        write_order(folder, spec, cell.costs, CachedOrder(stored, 0.0, 0.0))
    rule = simulate(make(spec), cell.costs).step_seconds
    found = best_schedule(spec, cell.costs, Effort(seconds), folder)
    print(f"{cell}: rule {rule:g}, found {found.seconds:g}, at least {found.least_seconds:g}", flush=True)
    if found.seconds < rule:
        orders = json.loads(ORDERS.read_text())
        orders[str(cell)] = write_csv(found.schedule)
        ORDERS.write_text(json.dumps(orders, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        for one in cells():
            if all(part in str(one) for part in sys.argv[2:]):
                seek(one, float(sys.argv[1]), Path(temporary))
