"""Keep, recompute, offload: the simulated step of the best order for a few sets per stage, by each way alone and by all three."""

from __future__ import annotations

from pathlib import Path

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Keep, Offload, RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import best_schedule

from ..charts import draw_points
from ..result import Options, Result, Table, Target

CLAIM = "with two sets of four, all three ways together take no longer than all sets, and less than each way alone"
STAGES, MICROBATCHES, COPY = 4, 16, 2.0
WAYS = {"keep or recompute": Offload.NONE, "keep or offload": Offload.ALWAYS, "all three": Offload.AUTO}
SETS = (1, 2, 3, 4)
SEARCH_SECONDS = 60.0


def share(sets: int, offload: Offload, seconds: float) -> float | None:
    """The step over that with all sets, (m + p - 1)(f + b), for f = r = 1, b = 2 and no hop; None: no order."""
    costs = Costs.spread(STAGES, offload=COPY)
    policy = RecomputePolicy(sets=sets, keep=Keep.AUTO, offload=offload)
    spec = ScheduleSpec("auto", tuple(range(STAGES)), MICROBATCHES, policy)
    try:
        found = best_schedule(spec, costs, Effort(seconds))
    except ValueError:  # `always` finds no place with so few sets
        return None
    return found.seconds / (3 * (MICROBATCHES + STAGES - 1))


def run(options: Options) -> Result:
    seconds = 0.0 if options.quick else SEARCH_SECONDS
    found = {name: {sets: share(sets, way, seconds) for sets in SETS} for name, way in WAYS.items()}
    result = Result("ways", CLAIM, settings={"search_seconds": seconds, "copy": COPY})
    lines = tuple(
        (name, *("no order" if one is None else f"{one:.3f}" for one in shares.values()))
        for name, shares in found.items()
    )
    title = f"{STAGES} stages, {MICROBATCHES} microbatches, a copy of a set takes {COPY:g} forwards: simulated step over that of all sets"
    result.tables.append(Table(title, ("", *(f"{sets} sets" for sets in SETS)), lines))
    result.data["shares"] = {name: list(shares.values()) for name, shares in found.items()}
    two = [shares[2] or float("inf") for shares in found.values()]
    result.targets.append(Target("2 sets: all three, over all sets", two[-1], 1.0 if seconds else 1.04))
    result.targets.append(Target("2 sets: all three, over the better of the others", two[-1] / min(two[:-1]), 0.99))

    def draw(path: Path) -> None:
        series = {
            name: [(float(sets), one) for sets, one in shares.items() if one is not None]
            for name, shares in found.items()
        }
        draw_points(
            path,
            f"simulated, {title.split(': ')[0]}",
            "sets per stage on the device",
            "step over that of all sets",
            series,
        )

    result.draw = draw
    return result
