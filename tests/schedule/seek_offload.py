"""Steps with sets in host memory beside those without: `python tests/schedule/seek_offload.py SECONDS [p,m,K,o ...] [none] [auto] [always]`, SECONDS for
each search.

Times are parts of (m + p - 1)(f + b), for f = r = 1, b = 2 and no hop; o is the time to copy a set one way.
"""

from __future__ import annotations

import sys
import time

from pipetrain.schedule.bound import proven_gap
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Keep, Offload, RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import best_schedule

CELLS = ("4,16,1,1", "4,16,2,1", "4,16,2,2", "4,16,2,3", "3,6,1,1", "6,12,2,1.5", "8,16,2,2", "8,32,3,3", "4,16,2,40")


def step(cell: str, offload: Offload, seconds: float) -> str:
    """The step of the best order, with * where it is proven to be; the sets that are offloaded, kept and recomputed; the time of the search."""
    stages, microbatches, places, copy = (float(number) for number in cell.split(","))
    costs = Costs.spread(int(stages), offload=copy)
    policy = RecomputePolicy(sets=places, keep=Keep.AUTO, offload=offload)
    spec = ScheduleSpec("auto", tuple(range(int(stages))), int(microbatches), policy)
    start = time.monotonic()
    found = best_schedule(spec, costs, Effort(seconds))
    proven = "*" if proven_gap(found.seconds, found.least_seconds) == 0 else ""
    away, kept = len(found.schedule.offloaded), len(found.schedule.kept)
    sets = f"{away} away, {kept} kept, {int(stages * microbatches) - away - kept} again"
    never = 3 * (microbatches + stages - 1)
    return f"{found.seconds / never:.4f}{proven} ({sets}; {time.monotonic() - start:.0f} s)"


if __name__ == "__main__":
    ways = [way for way in Offload if way.value in sys.argv] or list(Offload)
    for one in [word for word in sys.argv[2:] if "," in word] or CELLS:
        for way in ways:
            for effort in (0.0, float(sys.argv[1])) if way is Offload.AUTO else (float(sys.argv[1]),):
                print(f"p,m,K,o={one} offload={way} {effort:g} s of search: {step(one, way, effort)}", flush=True)
