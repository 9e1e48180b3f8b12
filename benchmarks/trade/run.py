"""What time costs in memory: whole sets, copies to host memory, segments and selective recomputation of a real transformer, on two stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetrain.config.records import ModelConfig
from pipetrain.schedule.policy import Mode, Offload

from ..charts import draw_points
from ..ranks import preload
from ..result import Options, Result, Table, Target
from ..systems import Ours
from ..transformer import VOCABULARY, TransformerWorkload
from ..trial import Row, run_rounds

CLAIM = "between all sets and one there is a choice: each way to keep less takes less memory, and says what it takes in time"
SETS, SEGMENTS, SELECTIVE, BOTH = "whole sets", "segments", "selective", "segments and selective"
COPIES = "sets, and copies"
ALL = "all sets"
FAMILY = "gpipe"


@dataclass(frozen=True)
class Point:
    """One way to keep less than all; `keys` are those for `pipetrain train`."""

    series: str
    keys: str
    system: Ours


def points(*, quick: bool) -> list[Point]:
    """Every way, from all sets down."""
    found = [
        _point(ALL, mode=Mode.NEVER),
        *(_point(SETS, sets=sets) for sets in (4, 3, 2, 1)),
        *(_point(SEGMENTS, segments=segments) for segments in (2, 3, "layers")),
        _point(SEGMENTS, segments=2, sets=1.5),
        *(_point(SELECTIVE, selective=kept) for kept in (("attention",), ("matmul",), ("attention", "matmul"))),
        *(_point(BOTH, segments=segments, selective=("attention",)) for segments in (2, "layers")),
        *(_point(COPIES, sets=2, offload=offload) for offload in (Offload.AUTO, Offload.ALWAYS)),
    ]
    return found[:2] + found[5:6] + found[9:10] if quick else found


def _point(
    series: str,
    *,
    mode: Mode = Mode.OVERLAP,
    sets: float | None = None,
    segments: int | str = 1,
    selective: tuple[str, ...] = (),
    offload: Offload = Offload.NONE,
) -> Point:
    given = {"sets": sets, "segments": segments if segments != 1 else None, "selective": ",".join(selective)}
    given["offload"] = None if offload is Offload.NONE else offload
    told = [f"recompute={mode}"]
    told += [
        f"recompute.{key}={f'[{value}]' if key == 'selective' else value}" for key, value in given.items() if value
    ]
    system = Ours(
        FAMILY,
        mode,
        sets=(1 if segments == 1 else None) if sets is None else sets,
        segments=segments,
        selective=selective,
        offload=offload,
        label=" ".join(told),
    )
    return Point(series, system.name, system)


def run(options: Options) -> Result:
    preload()
    model = ModelConfig(num_hidden_layers=10, hidden_size=256, num_attention_heads=8)
    load = TransformerWorkload(2, num_microbatches=6, rows=2, sequence_length=128, model=model)
    if options.quick:
        load = TransformerWorkload(2, num_microbatches=4, sequence_length=32)
    wanted = points(quick=options.quick)
    rows = run_rounds([point.system for point in wanted], load, rounds=options.rounds, steps=1 if options.quick else 3)
    result = Result("trade", CLAIM, settings={"model": asdict(load.model), "rounds": options.rounds})
    result.tables.append(_table(load, wanted, rows))
    result.data = {"rows": [row.to_json() for row in rows]}
    result.targets += targets_of(wanted, rows)
    shown = _series(wanted, rows)
    result.draw = lambda path: _draw(path, shown)
    return result


def _table(load: TransformerWorkload, wanted: Sequence[Point], rows: Sequence[Row]) -> Table:
    base = rows[0]
    lines = tuple(
        (
            point.keys,
            f"{_bytes(row) / 1e6:.1f}",
            f"{_bytes(row) / _bytes(base):.2f}",
            f"{row.median_seconds * 1e3:.0f}",
            f"{row.spread:.1%}",
            f"{row.median_seconds / base.median_seconds:.3f}",
        )
        for point, row in zip(wanted, rows)
    )
    title = (
        f"{load.model.num_hidden_layers} Llama blocks, hidden {load.model.hidden_size}, embedding and head, 2 stages, {FAMILY}, {load.num_microbatches} "
        f"microbatches of {load.rows} x {load.sequence_length} tokens, {VOCABULARY} tokens in all, one thread a rank"
    )
    return Table(title, ("keys", "MB, fullest rank", "x all sets", "step ms", "spread", "x all sets' time"), lines)


def _bytes(row: Row) -> int:
    metered = row.peak_meter_bytes
    assert metered is not None
    return metered


def targets_of(wanted: Sequence[Point], rows: Sequence[Row]) -> list[Target]:
    """No way takes more than all sets, and a layer at a time less than one set."""
    of = {point.keys: row for point, row in zip(wanted, rows)}
    most = max(_bytes(row) for row in rows[1:]) / _bytes(rows[0])
    targets = [Target("bytes of any way / all sets", most, 1.0)]
    whole, parts = of.get("recompute=overlap recompute.sets=1"), of.get("recompute=overlap recompute.segments=layers")
    if whole is not None and parts is not None:
        targets.append(Target("bytes of a layer at a time / one whole set", _bytes(parts) / _bytes(whole), 1.0))
    return targets


def _series(wanted: Sequence[Point], rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Megabytes and time over that of all sets, by series, from the least bytes on."""
    series: dict[str, list[tuple[float, float]]] = {}
    for point, row in zip(wanted, rows):
        place = (_bytes(row) / 1e6, row.median_seconds / rows[0].median_seconds)
        series.setdefault(point.series, []).append(place)
    series.setdefault(SETS, []).extend(series.pop(ALL))
    return {name: sorted(places) for name, places in series.items()}


def _draw(path: Path, series: dict[str, list[tuple[float, float]]]) -> None:
    draw_points(
        path,
        "Time against bytes, a transformer on two stages",
        "MB of activations on the fullest rank, metered",
        "step time / step time with all sets",
        series,
    )
