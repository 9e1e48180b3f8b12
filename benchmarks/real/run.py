"""A real GPT on this machine's cores: tokens per second of forward and backward, and the machine's noise."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.schedule.policy import Mode

from ..charts import OURS, PEER_WITH, PEER_WITHOUT, Bar, Panel, draw_bars
from ..comparison import peers_for
from ..result import Options, Result, Table
from ..systems import Ours, System
from ..transformer import TransformerWorkload
from ..trial import Row, run_rounds

CLAIM = "with real layers on this machine's cores, two stages of one thread each"


def run(options: Options) -> Result:
    workload = TransformerWorkload(2)
    modes = (Mode.OVERLAP,) if options.quick else tuple(Mode)
    ours: list[System] = [Ours(family, mode) for family in ("gpipe", "1f1b") for mode in modes]
    peers, missing = peers_for(options.quick)
    rows = run_rounds([*ours, *peers], workload, rounds=options.rounds, steps=2 if options.quick else 10)
    settings = {
        "rounds": options.rounds,
        "model": vars(workload.model),
        "stages": 2,
        "num_microbatches": workload.num_microbatches,
        "rows": workload.rows,
        "sequence_length": workload.sequence_length,
    }
    result = Result("real", CLAIM, settings=settings)
    result.notes += [*missing, *(f"{row.system.name} crashed: {row.error}" for row in rows if row.error)]
    ran = [row for row in rows if row.trials]
    noise = max(row.spread for row in ran)
    result.notes.append(f"the same system differed by up to {noise:.0%} between rounds: less than that is within noise")
    result.tables.append(_table(ran, workload))
    result.data = {"tokens_per_step": workload.tokens_per_step, "rows": [row.to_json() for row in rows]}
    result.draw = lambda path: draw_bars(path, [_panel(ran, workload)])
    return result


def _table(rows: Sequence[Row], workload: TransformerWorkload) -> Table:
    tokens = workload.tokens_per_step
    lines = tuple(
        (
            row.system.name,
            f"{tokens / row.median_seconds:.0f}",
            f"{tokens / max(row.rounds):.0f}",
            f"{tokens / row.best_seconds:.0f}",
            f"{row.median_seconds * 1e3:.0f}",
            f"{row.peak_live_bytes / 1e6:.1f}",
        )
        for row in rows
    )
    title = "a GPT of four blocks of 128, 2 stages, 8 microbatches of 2 x 256 tokens, forward and backward, one thread a rank"
    return Table(title, ("", "tokens/s", "slowest round", "fastest", "step ms", "live MB"), lines)


def _panel(rows: Sequence[Row], workload: TransformerWorkload) -> Panel:
    tokens = workload.tokens_per_step
    bars = []
    for row in rows:
        peer = PEER_WITH if row.system.recomputes else PEER_WITHOUT
        colour = peer if row.system.is_peer else OURS
        low, high = tokens / max(row.rounds), tokens / row.best_seconds
        bars.append(Bar(row.system.name, tokens / row.median_seconds, low, high, colour))
    return Panel("a GPT on the CPU's cores, 2 stages", "tokens per second (more is better)", tuple(bars), {})
