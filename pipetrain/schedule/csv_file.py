"""Schedules as CSV files, in the compute-only spelling of torch.distributed.pipelining plus `R`.

    0F0,0F1,,0R0,0B0,0R1,0B1        a line per rank; empty cells are idle time and mean nothing
    1F0,1B0,1F1,1B1

Without R, torch's own runtime reads the file. A file with R says itself which sets are recomputed, all others are kept;
one without leaves that to the policy.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipetrain.schedule.families import ComputeLanes, Shape
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.recompute import with_recompute
from pipetrain.schedule.schedule import Schedule

_KINDS = (Kind.F, Kind.R, Kind.B)


def write_csv(schedule: Schedule) -> str:
    """The text of the file; an R on a lane of its own is written before its B."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    recomputed = {(op.stage, op.microbatch) for _, lane, op in schedule.ops() if lane is Lane.RECOMPUTE}
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        writer.writerow(str(op) for op in with_recompute(compute, lambda op: (op.stage, op.microbatch) in recomputed))
    return out.getvalue()


def size_of_csv(path: str | Path) -> tuple[int, int, int]:
    """(num_stages, num_ranks, num_microbatches) that the ops of a file span.

    Raises:
        ValueError: as `read_csv`.
    """
    rows = _rows(Path(path))
    ops = [op for row in rows for _, op in row]
    if not ops:
        raise ValueError(f"{path}: holds no op; write a line per rank, as in 0F0,0F1,0B0,0B1")
    return max(op.stage for op in ops) + 1, len(rows), max(op.microbatch or 0 for op in ops) + 1


def read_csv(path: str | Path, shape: Shape) -> ComputeLanes:
    """The F, R and B of each rank.

    Raises:
        ValueError: the file is not there, or does not hold a schedule of this shape; the message says line and cell
            (both from 1) and what is allowed.
    """
    rows = _rows(Path(path))
    if len(rows) != shape.num_ranks:
        raise ValueError(
            f"{path}: has {len(rows)} lines of ops; allowed is one per rank, which makes {shape.num_ranks}"
        )
    lanes: ComputeLanes = []
    for rank, row in enumerate(rows):
        seen: Counter[Op] = Counter()
        for place, op in row:
            fault = _fault(op, rank, shape)
            if seen[op]:
                fault = "stands in this line twice; allowed is once"
            if fault:
                raise ValueError(f"{place}: {op} {fault}")
            seen[op] += 1
        lanes.append([op for _, op in row])
        for op in _expected(rank, shape):
            if op not in seen:
                last = row[-1][0] if row else f"{path}, line {rank + 1}"
                raise ValueError(f"{last}: the line ends without {op}; each stage needs F and B for each microbatch")
    return lanes


def _rows(path: Path) -> list[list[tuple[str, Op]]]:
    """Per line with a cell in it the ops with their place; lines without one are left out."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"pipeline.schedule={str(path)!r} cannot be read: {error}") from None
    rows = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        if cells:
            places = [(f"{path}, line {line}, cell {number}", cell) for number, cell in enumerate(cells, start=1)]
            rows.append([(place, _parsed(place, cell)) for place, cell in places if cell.strip()])
    return rows


def _parsed(place: str, cell: str) -> Op:
    try:
        op = Op.parse(cell)
    except ValueError:
        op = None
    if op is None or op.kind not in _KINDS or op.part is not None or op.peer is not None:
        raise ValueError(
            f"{place}: {cell!r} is no op of a schedule file; allowed are stage, F, R or B, and microbatch, as in 2F0"
        )
    return op


def _fault(op: Op, rank: int, shape: Shape) -> str | None:
    if op.stage >= shape.num_stages:
        return (
            f"is of stage {op.stage}; allowed are 0 to {shape.num_stages - 1} (pipeline.num_stages={shape.num_stages})"
        )
    if (op.microbatch or 0) >= shape.num_microbatches:
        allowed = f"0 to {shape.num_microbatches - 1} (pipeline.num_microbatches={shape.num_microbatches})"
        return f"is of microbatch {op.microbatch}; allowed are {allowed}"
    if shape.stage_ranks[op.stage] != rank:
        return f"stands in the line of rank {rank}, but stage {op.stage} lives on rank {shape.stage_ranks[op.stage]}"
    return None


def _expected(rank: int, shape: Shape) -> Iterator[Op]:
    for stage in shape.stages_of(rank):
        for kind in (Kind.F, Kind.B) if stage >= shape.first_backward else (Kind.F,):
            yield from (Op(stage, kind, microbatch) for microbatch in range(shape.num_microbatches))
