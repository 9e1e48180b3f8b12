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

    All lanes of the rank of `marked`, the compute lane of the others.
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


def _centre(ops: Sequence[Op], marked: Op) -> int:
    """The place of `marked`, or of what belongs to the same microbatch, as near in kind as there is."""

    def distance(op: Op) -> tuple[bool, bool, bool]:
        return op != marked, op.microbatch != marked.microbatch, op.kind.value[-1] != marked.kind.value[-1]

    return min(range(len(ops)), key=lambda place: distance(ops[place]))


def _window(ops: Sequence[Op], marked: Op, width: int) -> str:
    """The names around `marked` or what is nearest to it, as many as fit into `width`."""
    names = [f"[{op}]" if op == marked else f"{op}" for op in ops]
    if not names:
        return "-"
    first = last = centre = _centre(ops, marked)
    room = width - len(names[centre]) - 8  # for "... " on both sides
    grew = True
    while grew:
        grew = False
        if first > 0 and len(names[first - 1]) < room:
            first, room, grew = first - 1, room - len(names[first - 1]) - 1, True
        if last + 1 < len(names) and len(names[last + 1]) < room:
            last, room, grew = last + 1, room - len(names[last + 1]) - 1, True
    shown = names[first : last + 1]
    return " ".join(["..."] * (first > 0) + shown + ["..."] * (last + 1 < len(names)))
