"""What each idea brings: alone, added one after the other, and when it alone is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from pipetrain.schedule.policy import Keep, LastStage, Mode
from pipetrain.schedule.simulate import simulate

from ..charts import OURS, Bar, Panel, draw_bars
from ..emulated import EmulatedWorkload
from ..links.hosts import check_available
from ..links.namespaces import shaped_network
from ..ranks import preload
from ..result import Options, Result, Table
from ..systems import Ours
from ..trial import Network, Row, measure_hop, run_rounds
from ..unavailable import Unavailable

CLAIM = (
    "what R as an op, its own lane, a last stage without R, receives posted ahead and kept sets bring; and for two sets, one pool, "
    "orders for it and W that wait"
)
_NOT_AHEAD, _AHEAD = 0, 2
_SEARCH_SECONDS = 20.0


def variants() -> list[Ours]:
    """From what the peers do (R inside the backward, on every stage, receives when needed) to all of it and a kept set."""

    def order(label: str, mode: Mode, last_stage: LastStage, ahead: int, sets: int = 1) -> Ours:
        return Ours("gpipe", mode, sets=sets, last_stage=last_stage, transport_ahead=ahead, label=label)

    always, auto = LastStage.ALWAYS, LastStage.AUTO
    return [
        order("none (R inline on every stage)", Mode.INLINE, always, _NOT_AHEAD),
        order("receives posted ahead, alone", Mode.INLINE, always, _AHEAD),
        order("last stage without R, alone", Mode.INLINE, auto, _NOT_AHEAD),
        order("R as an op, alone", Mode.EARLY, always, _NOT_AHEAD),
        order("R as an op on its own lane, alone", Mode.OVERLAP, always, _NOT_AHEAD),
        order("ahead + last stage", Mode.INLINE, auto, _AHEAD),
        order("ahead + last stage + R as an op", Mode.EARLY, auto, _AHEAD),
        order("all: + its own lane", Mode.OVERLAP, auto, _AHEAD),
        order("all but receives posted ahead", Mode.OVERLAP, auto, _NOT_AHEAD),
        order("all but last stage without R", Mode.OVERLAP, always, _AHEAD),
        order("all, and 2 sets", Mode.OVERLAP, auto, _AHEAD, sets=2),
        order("all, and 3 sets", Mode.OVERLAP, auto, _AHEAD, sets=3),
    ]


def orders(search_seconds: float) -> list[Ours]:
    """Two sets per stage: from places that serve R alone to one pool, orders for it, and W that wait."""

    def two_sets(label: str, family: str = "auto", seconds: float = 0.0, *, split: bool = False) -> Ours:
        return Ours(family, sets=2, search_seconds=seconds, split_backward=split, label=label)

    return [
        Ours("1f1b", sets=2, keep=Keep.NONE, label="none (1f1b, both places for R)"),
        two_sets("one pool (1f1b, sets kept where a place is free)", "1f1b"),
        two_sets("list order"),
        two_sets("list order + search", seconds=search_seconds),
        two_sets("one pool, I and W", "1f1b", split=True),
        two_sets("list order, I and W", split=True),
        two_sets("all: list order + search, I and W", seconds=search_seconds, split=True),
    ]


def run(options: Options) -> Result:
    preload()
    result = Result(
        "ablation",
        CLAIM,
        settings={"rounds": options.rounds, "stages": 4, "search_seconds": 0.0 if options.quick else _SEARCH_SECONDS},
    )
    panels = []
    for title, workload, megabits, rows_of in _cases(options, result):
        with ExitStack() as stack:
            network = stack.enter_context(shaped_network(4, megabits=megabits)) if megabits else Network()
            hop = measure_hop(workload, network=network)
            systems = [system.sought(workload, workload.costs(hop)) for system in rows_of]
            rows = run_rounds(systems, workload, rounds=options.rounds, steps=1, network=network)
        title = f"{title} (hop {hop / workload.forward_seconds:.2f} f)"
        result.tables.append(_table(title, rows, workload, hop))
        result.data[title] = [row.to_json() for row in rows]
        panels.append(_panel(title, rows, workload))
    result.draw = lambda path: draw_bars(path, panels)
    return result


def _cases(options: Options, result: Result) -> list[tuple[str, EmulatedWorkload, int, list[Ours]]]:
    """Inside the machine, and over links where that is possible: name, workload, Mbit/s (0: no limit), rows."""
    ideas, four = variants(), EmulatedWorkload(4)
    cases = [
        ("one machine: gpipe", four, 0, ideas[::7] if options.quick else ideas),
        ("one machine: two sets per stage", replace(four, num_microbatches=16), 0, orders(_SEARCH_SECONDS)),
    ]
    if options.quick:
        return [cases[0], (*cases[1][:3], orders(0.0)[::3])]
    try:
        check_available()
    except Unavailable as reason:
        result.notes.append(f"slow links skipped: {reason}")
        return cases
    over_links = replace(four, tensor_bytes=2_500_000)
    return [*cases, ("1 Gbit/s, 2.5 MB a tensor: gpipe", over_links, 1000, ideas)]


def _table(title: str, rows: Sequence[Row], workload: EmulatedWorkload, hop: float) -> Table:
    unit, base = workload.forward_seconds, rows[0].median_seconds
    lines = tuple(
        (
            row.system.name,
            f"{row.median_seconds / unit:.2f}",
            f"{row.spread:.1%}",
            f"{1 - row.median_seconds / base:+.1%}",
            f"{_simulated(row, workload, hop) / unit:.2f}",
            f"{row.peak_live_bytes / 1e6:.1f}",
        )
        for row in rows
    )
    headers = ("", "time / f", "spread", "saved", "simulated", "live MB")
    return Table(f"{title}: 4 stages, {workload.num_microbatches} microbatches", headers, lines)


def _simulated(row: Row, workload: EmulatedWorkload, hop: float) -> float:
    assert isinstance(row.system, Ours)
    return simulate(row.system.schedule(workload), workload.costs(hop)).step_seconds


def _panel(title: str, rows: Sequence[Row], workload: EmulatedWorkload) -> Panel:
    unit = workload.forward_seconds
    bars = tuple(
        Bar(row.system.name, row.median_seconds / unit, min(row.rounds) / unit, max(row.rounds) / unit, OURS)
        for row in rows
    )
    return Panel(title, "step time / f", bars, {})
