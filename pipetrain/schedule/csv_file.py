"""Schedules as CSV files, in the compute-only spelling of torch.distributed.pipelining plus `R`.

    0F0,0F1,,0R0,0B0,0R1,0B1        a line per rank; empty cells are idle time and mean nothing
    1F0,1I0,1F1,1W0,1I1,1W1         I and W are the halves of a B
    0F0,0R0.1,0B0.1,0R0.0,0B0.0     with recompute.segments=2 R and B of each part, from the last

Without R, torch's own runtime reads the file. A file with R says itself which sets are recomputed, all others are kept;
one without leaves that to the policy, unless its first line is the word

    keep                            all sets are kept

torch's DualPipeV writes (0F3;3B1)OVERLAP_F_B for an F and a B whose kernels run at the same time: read as F, then B.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from pipetrain.schedule.families import AUTO, ComputeLanes, Shape
from pipetrain.schedule.kinds import RECOMPUTE, kinds_where
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import AllKept, order_of, with_recompute
from pipetrain.schedule.schedule import Schedule

_KINDS = kinds_where(lambda row: row.in_csv)
_ALL_KEPT = "keep"  # the line that says so
_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


def write_csv(schedule: Schedule) -> str:
    """The text of the file; an R on a lane of its own is written before its B, or I, in `auto` where it may start."""
    if schedule.family == AUTO:
        return csv_of_order(order_of(schedule))
    recomputed = {(op.stage, op.microbatch) for _, lane, op in schedule.ops() if lane is Lane.RECOMPUTE}
    compute = (schedule.lane(rank, Lane.COMPUTE) for rank in range(schedule.num_ranks))
    lanes = [list(with_recompute(ops, lambda op: (op.stage, op.microbatch) in recomputed)) for ops in compute]
    has_r = any(op.kind is RECOMPUTE for lane in lanes for op in lane)
    keeps_all = schedule.kept and schedule.policy.mode is not Mode.NEVER and not has_r
    return csv_of_order(AllKept(lanes) if keeps_all else lanes)


def csv_of_order(order: ComputeLanes) -> str:
    """The text of a file that holds the ops of each rank as they are."""
    out = io.StringIO()
    head = [[_ALL_KEPT]] if isinstance(order, AllKept) else []
    csv.writer(out, lineterminator="\n").writerows([*head, *order])
    return out.getvalue()


def size_of_csv(path: str | Path) -> tuple[int, int, int]:
    """(num_stages, num_ranks, num_microbatches) that the ops of a file span.

    Raises:
        ValueError: the file cannot be read, or holds no op.
    """
    lanes = _lanes(_text(Path(path)), str(path))
    ops = [op for lane in lanes for op in lane]
    if not ops:
        raise ValueError(f"{path}: holds no op; write a line per rank, as in 0F0,0F1,0B0,0B1")
    return max(op.stage for op in ops) + 1, len(lanes), max(op.microbatch or 0 for op in ops) + 1


def read_csv(path: str | Path, shape: Shape) -> ComputeLanes:
    """The ops of each rank's compute lane: F, B, I and W, and R if the file has them; `AllKept` if it says so.

    Raises:
        ValueError: the file is not there, has a cell that is no op (line and cell count from 1), or another number of ranks.
    """
    return order_of_csv(_text(Path(path)), str(path), shape)


def order_of_csv(text: str, path: str, shape: Shape) -> ComputeLanes:
    """The same of what a file at `path` would hold."""
    lanes = _lanes(text, path)
    if len(lanes) != shape.num_ranks:
        raise ValueError(
            f"{path}: has {len(lanes)} lines of ops; allowed is one per rank, which makes {shape.num_ranks}"
        )
    return lanes


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"pipeline.schedule={str(path)!r} cannot be read: {error}") from None


def _lanes(text: str, path: str) -> ComputeLanes:
    lines = [(line, cells) for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1) if cells]
    all_kept = bool(lines) and [cell.strip() for cell in lines[0][1] if cell.strip()] == [_ALL_KEPT]
    lanes = []
    for line, cells in lines[1:] if all_kept else lines:
        lane = []
        for number, cell in enumerate(map(str.strip, cells), start=1):
            pair = _PAIR.fullmatch(cell)
            for spelling in pair.groups() if pair else [cell] * bool(cell):
                lane.append(_op(spelling, f"{path}, line {line}, cell {number}"))
        lanes.append(lane)
    return AllKept(lanes) if all_kept else lanes


def _op(text: str, place: str) -> Op:
    try:
        op = Op.parse(text)
    except ValueError:
        op = None
    if op is None or op.kind not in _KINDS or op.peer is not None:
        raise ValueError(
            f"{place}: {text!r} is no op of a schedule file; allowed are stage, F, R, B, I or W, and microbatch, as in 2F0"
        )
    return op
