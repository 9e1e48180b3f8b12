"""Schedules as CSV files, in the compute-only spelling of torch.distributed.pipelining plus `R`.

    0F0,0F1,,0R0,0B0,0R1,0B1        a line per rank; empty cells are idle time and mean nothing
    1F0,1I0,1F1,1W0,1I1,1W1         I and W are the halves of a B
    0F0,0R0.1,0B0.1,0R0.0,0B0.0     with recompute.segments=2 R and B of each part, from the last

    0F0,0F1,0OFFLOAD0,0F2,0RELOAD0,0B0   copies of a set to host memory and back; 0OFFLOAD0 stands where it ends

torch's own runtime can read a file without R and copies. If a file has R or copies, their sets are recomputed or offloaded, and all
others are kept. If it has none, the policy decides, unless the first line is the word

    keep                            all sets are kept

torch's DualPipeV writes (0F3;3B1)OVERLAP_F_B for an F and a B whose kernels run at the same time. A rank runs one op at a time here, so such
a cell is refused.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from pathlib import Path

from pipetrain.schedule.check import violation_of
from pipetrain.schedule.families import AUTO, ComputeLanes, Shape
from pipetrain.schedule.kinds import COPY_LANES, PASS_SEQUENCES, RECOMPUTE, Direction
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import AllKept, order_of, with_recompute
from pipetrain.schedule.schedule import Schedule, in_parts

_ALL_KEPT = "keep"  # the line that says so
_PAIR = "OVERLAP_F_B"


def write_csv(schedule: Schedule) -> str:
    """The text of the file. An R of the recompute lane is before its B or I; in `auto` and with copies, where it may start."""
    if schedule.family == AUTO or schedule.order:
        return csv_of_order(order_of(schedule))
    recomputed = {(op.stage, op.microbatch) for _, lane, op in schedule.ops() if lane is Lane.RECOMPUTE}
    compute = (schedule.lane(rank, Lane.COMPUTE) for rank in range(schedule.num_ranks))
    lanes = [list(with_recompute(ops, lambda op: (op.stage, op.microbatch) in recomputed)) for ops in compute]
    has_r = any(op.kind is RECOMPUTE for lane in lanes for op in lane)
    keeps_all = schedule.kept and schedule.policy.mode is not Mode.NEVER and not has_r
    return csv_of_order(AllKept(lanes) if keeps_all else lanes)


def csv_of_order(order: ComputeLanes) -> str:
    """The text of a file that holds the ops of each rank as they are."""
    head = f"{_ALL_KEPT}\n" if isinstance(order, AllKept) else ""
    return head + "".join(",".join(map(str, lane)) + "\n" for lane in order)


def size_of_csv(path: str | Path) -> tuple[int, int, int]:
    """(num_stages, num_ranks, num_microbatches) that the ops of a file span.

    Raises:
        ValueError: as `read_csv`.
    """
    rows, _ = _rows(_text(Path(path)), str(path))
    ops = [op for row in rows for _, op in row]
    if not ops:
        raise ValueError(f"{path}: holds no op; write a line per rank, as in 0F0,0F1,0B0,0B1")
    return max(op.stage for op in ops) + 1, len(rows), max(op.microbatch or 0 for op in ops) + 1


def read_csv(path: str | Path, shape: Shape) -> ComputeLanes:
    """The ops of each rank in the order of the file: F, B, I, W, R, copies and CALL; `AllKept` if the file says `keep`.

    Raises:
        ValueError: the file is not there, or does not hold a schedule of this shape; the message says line and cell
            (both from 1) and what is allowed.
    """
    return order_of_csv(_text(Path(path)), str(path), shape)


def order_of_csv(text: str, path: str, shape: Shape) -> ComputeLanes:
    """As `read_csv`, for the text of a file; `path` names the file in errors.

    Raises:
        ValueError: as `read_csv`.
    """
    rows, all_kept = _rows(text, path)
    if len(rows) != shape.num_ranks:
        raise ValueError(
            f"{path}: has {len(rows)} lines of ops; allowed is one per rank, which makes {shape.num_ranks}"
        )
    for rank, row in enumerate(rows):
        places: dict[Op, str] = {}
        for place, op in row:
            fault = violation_of(op, rank, shape)
            if op in places:
                fault = "stands in this line twice; allowed is once"
            elif all_kept and op.kind is RECOMPUTE:
                fault = f"recomputes a set, but the first line says {_ALL_KEPT!r}; remove one of the two"
            if fault:
                raise ValueError(f"{place}: {op} {fault}")
            places[op] = place
        end = row[-1][0] if row else f"{path}, line {rank + 1}"
        for stage in shape.stages_of(rank):
            _check_ways(stage, shape, places, end)
    lanes = [[op for _, op in row] for row in rows]
    return AllKept(lanes) if all_kept else lanes


def _rows(text: str, path: str) -> tuple[list[list[tuple[str, Op]]], bool]:
    """For each line that has a cell, its ops with their positions (file, line and cell); and whether the file says `keep`."""
    lines = [(line, cells) for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1) if cells]
    all_kept = bool(lines) and [cell.strip() for cell in lines[0][1] if cell.strip()] == [_ALL_KEPT]
    rows = []
    for line, cells in lines[1:] if all_kept else lines:
        places = [(f"{path}, line {line}, cell {number}", cell) for number, cell in enumerate(cells, start=1)]
        rows.append([(place, _op_of(place, cell)) for place, cell in places if cell.strip()])
    return rows, all_kept


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"pipeline.schedule={str(path)!r} cannot be read: {error}") from None


def _op_of(place: str, cell: str) -> Op:
    if _PAIR in cell:
        raise ValueError(
            f"{place}: {cell.strip()!r}: a rank runs one op at a time; write the F and the B of an {_PAIR} as two cells, in this order"
        )
    try:
        op = Op.parse(cell)
    except ValueError:
        op = None
    if op is None or not (op.kind.computes or op.kind.row.lane in COPY_LANES) or op.peer is not None:
        raise ValueError(
            f"{place}: {cell!r} is no op of a schedule file; allowed are stage, F, R, B, I, W, OFFLOAD, RELOAD or CALL, and microbatch, as in 2F0"
        )
    return op


def _check_ways(stage: int, shape: Shape, places: Mapping[Op, str], end: str) -> None:
    """Each microbatch passes the stage once in each direction. `places` are the cells of the line's ops, in order."""
    order = {op: number for number, op in enumerate(places)}
    directions = Direction if stage >= shape.first_backward else (Direction.FORWARD,)
    for direction, microbatch in itertools.product(directions, range(shape.num_microbatches)):
        ways = [[Op(stage, kind, microbatch) for kind in way] for way in PASS_SEQUENCES[direction]]
        if direction is Direction.BACKWARD and shape.parts_of(stage) > 1:
            ways += [list(in_parts(op, shape.parts_of(stage))) for (op,) in ways[:1]]
        there = [way for way in ways if any(op in places for op in way)]
        if not there:
            raise ValueError(f"{end}: the line ends without {ways[0][0]}; each stage needs F and B for each microbatch")
        first, *more = [op for way in there for op in way if op in places]
        if len(there) > 1:
            raise ValueError(f"{places[more[-1]]}: {more[-1]} is extra to {first}; allowed are B, or I and W, not both")
        if len(there[0]) > 1 + len(more):
            missing = next(op for op in there[0] if op not in places)
            raise ValueError(f"{places[first]}: {first} stands without {missing}; allowed are B, or I and W after it")
        for before, after in itertools.pairwise(there[0]):
            if order[after] < order[before]:
                what = "whose other half it is" if after.part is None else "whose backward runs first"
                raise ValueError(f"{places[after]}: {after} stands before {before}, {what}")
