"""A schedule around one op, as text: what errors show.

rank 0 compute    0F0 0F1  0B0
rank 1 compute    1F0 1B0 [1F1] 1B1
       send       1SEND_B0 1SEND_B1
       recv       1RECV_F0 1RECV_F1
"""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule

_NEIGHBOURS = 2  # ranks shown on each side


def grid(schedule: Schedule, marked: Op, *, width: int = 110) -> str:
    """The ranks around `marked` with their ops in lane order; `marked` stands in brackets, if it is anywhere.

    It shows all lanes of the rank of `marked`, and the compute lanes of the other ranks.
    """
    home = next((rank for rank, _, op in schedule.ops() if op == marked), None)
    if home is None:
        in_range = 0 <= marked.stage < schedule.num_stages
        home = schedule.stage_ranks[marked.stage] if in_range else 0
    lines = []
    for rank in range(max(0, home - _NEIGHBOURS), min(schedule.num_ranks, home + _NEIGHBOURS + 1)):
        label = f"rank {rank}"
        for lane in Lane if rank == home else (Lane.COMPUTE,):
            ops = schedule.lane(rank, lane)
            if ops or lane is Lane.COMPUTE:
                lines.append(f"{label:<8}{lane.value:<10}{_window(ops, marked, width - 18)}")
                label = ""
    return "\n".join(lines)


def _window(ops: Sequence[Op], marked: Op, width: int) -> str:
    """The names around `marked`, or around the op nearest to it in microbatch and kind: as many on each side as fit `width`."""
    if not ops:
        return "-"

    def distance(place: int) -> tuple[bool, bool, bool]:
        op = ops[place]
        return op != marked, op.microbatch != marked.microbatch, op.kind.value[-1] != marked.kind.value[-1]

    centre = min(range(len(ops)), key=distance)
    names = [f"[{op}]" if op == marked else f"{op}" for op in ops]
    for around in range(min(len(ops), width), -1, -1):
        first, end = max(0, centre - around), centre + around + 1
        text = " ".join(["..."] * (first > 0) + names[first:end] + ["..."] * (end < len(names)))
        if len(text) <= width:
            break
    return text
