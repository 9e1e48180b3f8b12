"""The picture of time against sets in docs/SCHEDULES.md: what an order of a kind takes with K sets per stage, and what none can beat.

python docs/pictures/frontier.py              draws frontier.svg from frontier.json
python docs/pictures/frontier.py --simulate   simulates the orders again, first (a minute, on one core)

Eight ranks, sixteen microbatches, F 1, B 2 (I 1 and W 1), R 1, no hop; `zbv` has two stages of half of that on each rank. Orders of `auto` that took a
search are those of tests/plan/orders.json, which `python tests/plan/seek.py 60 "8 stages, 16 microbatches, hop 0, "` seeks again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipetrain.monitor.draw.palette import LOOKS, THEME
from pipetrain.monitor.draw.table import Table, number
from pipetrain.schedule.bound import bound
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv
from pipetrain.schedule.make import make, make_schedule
from pipetrain.schedule.policy import Keep, RecomputePolicy
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import best_schedule
from pipetrain.schedule.simulate import simulate

HERE = Path(__file__).parent
ORDERS = HERE.parents[1] / "tests" / "plan" / "orders.json"
RANKS, MICROBATCHES = 8, 16
SETS = (1, 2, 3, 4, 6, 8)
COSTS = Costs.spread(RANKS)
HALF = Costs.spread(2 * RANKS, forward=0.5, backward=1.0, recompute=0.5)

Line = dict[str, float]  # K -> time of the step over that of GPipe and 1F1B with all sets, (m + p - 1)(f + b)


def never() -> float:
    """What GPipe and 1F1B take without recomputation."""
    return (MICROBATCHES + RANKS - 1) * (COSTS.forward[0] + COSTS.backward[0])


def named(families: tuple[str, ...], mode: str = "overlap", *, split: bool = False) -> Callable[[int], float]:
    """The best of some families."""

    def seconds(sets: int) -> float:
        return min(_family(family, RecomputePolicy(mode, sets=sets), split=split) for family in families)  # type: ignore[arg-type]

    return seconds


def _family(family: str, policy: RecomputePolicy, *, split: bool) -> float:
    costs = HALF if family == "zbv" else COSTS
    schedule = make_schedule(
        family,
        num_stages=costs.num_stages,
        num_ranks=RANKS,
        placement="v" if family == "zbv" else "loop",
        num_microbatches=MICROBATCHES,
        recompute=policy,
        costs=costs,
        split_backward=split and family not in ("zb-h1", "zbv"),
    )
    return simulate(schedule, costs).step_seconds


def sought(*, split: bool) -> Callable[[int], float]:
    """`pipeline.schedule=auto`: an order that a search has found, or what needs none."""
    orders = json.loads(ORDERS.read_text())

    def seconds(sets: int) -> float:
        spec = ScheduleSpec("auto", tuple(range(RANKS)), MICROBATCHES, RecomputePolicy(sets=sets), split_backward=split)
        name = f"{RANKS} stages, {MICROBATCHES} microbatches, hop 0, {sets} places{', split' if split else ''}"
        if name not in orders:
            return best_schedule(spec, COSTS, Effort(0)).seconds
        order = order_of_csv(orders[name], name, spec.shape)
        return simulate(make(replace(spec, order=order)), COSTS).step_seconds

    return seconds


def least(*, split: bool) -> Callable[[int], float]:
    """What no order of one stage per rank can beat."""
    return lambda sets: bound(
        COSTS, MICROBATCHES, policy=replace(RecomputePolicy(sets=sets), keep=Keep.AUTO), split_backward=split
    )


def lines() -> dict[str, Callable[[int], float]]:
    """What the picture shows, from the slowest to the fastest."""
    return {
        "inline": named(("gpipe", "1f1b"), "inline"),
        "gpipe, 1f1b": named(("gpipe", "1f1b")),
        "auto": sought(split=False),
        "bound": least(split=False),
        "gpipe, 1f1b, zb-h1, split": named(("gpipe", "1f1b", "zb-h1"), split=True),
        "auto, split": sought(split=True),
        "bound, split": least(split=True),
        "zbv": named(("zbv",)),
    }


def simulated() -> dict[str, Any]:
    """What frontier.json holds."""
    found: dict[str, Line] = {}
    for name, seconds in lines().items():
        found[name] = {}
        for sets in SETS:
            found[name][str(sets)] = seconds(sets)
            print(f"{name}, K = {sets}: {found[name][str(sets)]:g}", flush=True)
    return {"seconds": found}


# The table and the picture ----------------------------------------------------------------------------------------


def table(facts: dict[str, Any]) -> str:
    """A line per order, a column per K: step over that of GPipe and 1F1B with all sets."""
    head = ("time / T_never", *(f"K = {sets}" for sets in SETS))
    rows = [
        [name, *(number(line[str(sets)] / never(), "{:.3f}") for sets in SETS)]
        for name, line in facts["seconds"].items()
    ]
    return Table(head, rows).as_text()


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 64, 230, 46, 52
_LOWEST, _HIGHEST = 0.70, 1.30  # of the axis
# Colour and dashes of each line: those of F for whole backwards, of I for halves, what no order beats in dashes.
_STROKES = {
    "inline": (LOOKS["recompute"].fill, ""),
    "gpipe, 1f1b": (LOOKS["forward"].fill, "2 3"),
    "auto": (LOOKS["forward"].fill, ""),
    "bound": (LOOKS["forward"].fill, "8 5"),
    "gpipe, 1f1b, zb-h1, split": (LOOKS["backward"].fill, "2 3"),
    "auto, split": (LOOKS["backward"].fill, ""),
    "bound, split": (LOOKS["backward"].fill, "8 5"),
    "zbv": (LOOKS["weight gradient"].fill, ""),
}


def _x(sets: float) -> float:
    return _LEFT + (sets - SETS[0]) / (SETS[-1] - SETS[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _TOP + (_HIGHEST - share) / (_HIGHEST - _LOWEST) * (_HEIGHT - _TOP - _BOTTOM)


def picture(facts: dict[str, Any]) -> str:
    """The picture as SVG."""
    title = f"Time of a step against sets per stage: {RANKS} ranks, {MICROBATCHES} microbatches"
    pieces = [
        f'<text class="text" x="{_LEFT}" y="22" font-weight="600">{title}</text>',
        *_axes(),
        *(_line(name, line) for name, line in facts["seconds"].items()),
        *_names(facts["seconds"]),
    ]
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    font = 'font-family="ui-sans-serif, -apple-system, Helvetica, Arial, sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{THEME}</style>", *pieces, "</svg>\n"])


def _axes() -> list[str]:
    end = _WIDTH - _RIGHT
    pieces = []
    for tenths in range(round(10 * _LOWEST), round(10 * _HIGHEST) + 1):
        y = _y(tenths / 10)
        strength = 0.6 if tenths == 10 else 0.2
        pieces.append(f'<path class="line" d="M{_LEFT} {y:.1f}H{end}" stroke-opacity="{strength}"/>')
        pieces.append(f'<text class="faint" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenths / 10:.1f}</text>')
    below = _HEIGHT - _BOTTOM
    pieces += [
        f'<text class="faint" x="{_x(sets):.1f}" y="{below + 20}" text-anchor="middle">{sets}</text>' for sets in SETS
    ]
    middle = (_LEFT + end) / 2
    pieces.append(
        f'<text class="text" x="{middle:.1f}" y="{below + 40}" text-anchor="middle">K: sets per stage (recompute.sets)</text>'
    )
    pieces.append(f'<text class="text" x="{_LEFT - 46}" y="{_TOP - 8}">time / T_never</text>')
    return pieces


def _line(name: str, line: Line) -> str:
    colour, dashes = _STROKES[name]
    points = " ".join(f"{_x(int(sets)):.1f},{_y(seconds / never()):.1f}" for sets, seconds in line.items())
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'


def _names(found: dict[str, Line]) -> list[str]:
    """A legend beside the lines, the slowest in few sets first."""
    pieces = []
    for place, name in enumerate(sorted(found, key=lambda name: -found[name][str(SETS[1])])):
        colour, dashes = _STROKES[name]
        y, x = _TOP + 14 + 22 * place, _WIDTH - _RIGHT + 14
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        pieces.append(f'<path d="M{x} {y - 4}h26" stroke="{colour}" stroke-width="2"{dashed}/>')
        pieces.append(f'<text class="text" x="{x + 32}" y="{y}">{name}</text>')
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="simulate the orders again")
    arguments = parser.parse_args()
    file = HERE / "frontier.json"
    if arguments.simulate:
        file.write_text(json.dumps(simulated(), indent=1) + "\n")
    facts = json.loads(file.read_text())
    (HERE / "frontier.svg").write_text(picture(facts))
    print(table(facts))


if __name__ == "__main__":
    main()
