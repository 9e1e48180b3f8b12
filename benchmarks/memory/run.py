"""What each rank holds for its backwards, and what time costs in memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipetrain.monitor.breakdown import break_down
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

from ..charts import draw_points
from ..comparison import peers_for
from ..emulated import EmulatedWorkload
from ..result import Options, Result, Table, Target
from ..systems import Ours, System
from ..transformer import TransformerWorkload
from ..trial import Row, run_rounds

CLAIM = "with recomputation a stage holds its inputs and one set, overlapped or not"
SETS = (1, 2, 3, 4, 5, 7)


def run(options: Options) -> Result:
    workload = TransformerWorkload(3)
    peers, missing = peers_for(options.quick)
    modes = (Mode.NEVER, Mode.OVERLAP) if options.quick else tuple(Mode)
    ours: list[System] = [Ours(family, mode) for family in ("gpipe", "1f1b") for mode in modes]
    rows = run_rounds([*ours, *peers], workload, rounds=1, steps=1)
    result = Result("memory", CLAIM, settings={"model": vars(workload.model), "stages": 3, "num_microbatches": 8})
    result.notes += [*missing, *(f"{row.system.name} crashed: {row.error}" for row in rows if row.error)]
    result.tables.append(_table_of_bytes(rows))
    result.targets += _targets(rows)
    curve = _curve(options)
    result.tables.append(_table_of_curve(curve))
    result.data = {"rows": [row.to_json() for row in rows], "curve": curve}
    series: dict[str, list[tuple[float, float]]] = {}
    for point in curve:
        series.setdefault(str(point["order"]), []).append((float(point["peak_sets"]), float(point["measured"])))
    result.draw = lambda path: draw_points(
        path,
        "Time against memory, 4 emulated stages",
        "sets alive on the fullest rank",
        "step time / f, measured",
        series,
    )
    return result


def _targets(rows: Sequence[Row]) -> list[Target]:
    """Our meter: first and middle stage against `never`, overlap against inline; and no rank above the peer's largest."""
    of = {row.system.name: row for row in rows if row.trials}
    never = _metered(of["pipetrain gpipe never"])
    overlap = _metered(of["pipetrain gpipe overlap"])
    targets = [
        Target("gpipe: overlap / never, first stage", overlap[0] / never[0], 0.15),
        Target("gpipe: overlap / never, middle stage", overlap[1] / never[1], 0.35),
    ]
    if "pipetrain gpipe inline" in of:
        inline = _metered(of["pipetrain gpipe inline"])
        most = max(ours / theirs for ours, theirs in zip(overlap, inline))
        targets.append(Target("gpipe: overlap / inline, any stage", most, 1.05))
    for family in ("gpipe", "1f1b"):
        peers = [
            row for row in of.values() if row.system.is_peer and row.system.recomputes and row.system.family == family
        ]
        for peer in peers:
            ratio = of[f"pipetrain {family} overlap"].peak_live_bytes / peer.peak_live_bytes
            targets.append(Target(f"{family} overlap: live bytes / {peer.system.name}", ratio, 1.0))
    return targets


def _metered(row: Row) -> tuple[int, ...]:
    metered = row.trials[0].peak_meter_bytes
    assert metered is not None
    return metered


def _table_of_bytes(rows: Sequence[Row]) -> Table:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if not row.trials:
            lines.append((row.system.name, "crashed", "", "", "", "", ""))
            continue
        live = [f"{size / 1e6:.1f}" for size in row.trials[0].peak_live_bytes]
        metered = row.trials[0].peak_meter_bytes
        lines.append((row.system.name, *live, *(f"{size / 1e6:.1f}" for size in metered or ())))
    headers = ("", *(f"live MB, rank {rank}" for rank in range(3)), *(f"meter, rank {rank}" for rank in range(3)))
    padded = tuple((*line, *[""] * (len(headers) - len(line))) for line in lines)
    return Table(
        "a GPT of four blocks of 128, 3 stages, 8 microbatches of 2 x 256 tokens; peak of a step", headers, padded
    )


def _curve(options: Options) -> list[dict[str, float | int | str]]:
    """Step time, simulated and measured, and sets alive, for each number of places; in units of f."""
    workload = EmulatedWorkload(4)
    unit = workload.forward_seconds
    orders = [
        Ours(family, mode, sets=sets, label=f"{family} {mode}, sets {sets}")
        for family in (("gpipe",) if options.quick else ("gpipe", "1f1b"))
        for mode in (Mode.INLINE, Mode.OVERLAP)
        for sets in (SETS[:1] if options.quick else SETS)
    ]
    orders += [Ours(family, Mode.NEVER, label=f"{family} never") for family in ("gpipe", "1f1b")]
    costs = Costs.spread(4, forward=unit, backward=2 * unit, recompute=unit)
    points: list[dict[str, float | int | str]] = []
    for row in run_rounds(orders, workload, rounds=1, steps=1 if options.quick else 2):
        system = row.system
        assert isinstance(system, Ours)
        schedule = system.schedule(workload)
        timeline = simulate(schedule, costs)
        points.append(
            {
                "order": f"{system.family} {system.mode}",
                "sets": system.sets,
                "peak_sets": max(rank.peak_sets for rank in break_down(schedule, timeline)),
                "simulated": timeline.step_seconds / unit,
                "measured": statistics.median(row.rounds) / unit,
                "peak_live_bytes": row.peak_live_bytes,
            }
        )
    return points


def _table_of_curve(curve: Sequence[dict[str, float | int | str]]) -> Table:
    rows = tuple(
        (
            f"{point['order']}, sets {point['sets']}",
            str(point["peak_sets"]),
            f"{float(point['peak_live_bytes']) / 1e6:.0f}",
            f"{float(point['simulated']):.2f}",
            f"{float(point['measured']):.2f}",
        )
        for point in curve
    )
    title = "4 emulated stages, 8 microbatches, a set of 16 MB; times in units of f"
    return Table(title, ("", "sets, fullest rank", "live MB", "simulated", "measured"), rows)
