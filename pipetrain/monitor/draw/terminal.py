"""Drawings as text. A timeline: a row per rank, a column per slice of time.

rank 0 F0F1F2........B0==B1==B2==
rank 1 ..F0F1F2....B0==B1==B2==
rank 2 ....F0B0==F1B1==F2B2==

The mesh of a run: who is where, what each rank holds, what goes where. The page has the same drawing.

           stage 0         stage 1
replica 0  rank 0   -->    rank 1      --> and | in a node, ==> and || between two
             ||              ||
replica 1  rank 2   -->    rank 3
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipetrain.monitor.draw.palette import Looks, drawn_kinds, looks_of
from pipetrain.monitor.draw.table import Table, count_of, number, size
from pipetrain.plan.mesh import MESSAGES, Mesh, MeshRank, Sent
from pipetrain.schedule.events import OpEvent, Timeline, ran_beside
from pipetrain.schedule.kinds import COPY_LANES, REDUCING
from pipetrain.schedule.op import Kind, Lane

_GAP = 3  # between columns of text
_LABEL_COLUMNS = 3  # an op gets this many columns if there is room: "F0" and a gap of its own kind


def staircase(timeline: Timeline, *, width: int = 80, colour: bool = False) -> str:
    """The computing ops of a timeline, never wider than `width` columns.

    `F0`, `R0`, `B0` are of microbatch 0, with the stage in front (`2F0`) where a rank has several; `.` is bubble, `%` one in which
    gradients are added up. With
    `colour`, in ANSI colours. A rank whose R ran beside other ops, as on a GPU, has a second row for R. Copies of sets to host memory and back
    have a row each, with the numbers of the microbatches.
    """
    computing = [event for event in timeline.events if event.op.kind.computes]
    names_stage = len({event.op.stage for event in computing}) > len({event.rank for event in computing})
    labels = [f"rank {rank} " for rank in range(timeline.num_ranks)]
    margin = max((len(label) for label in labels), default=0)
    columns = _columns(computing, timeline.step_seconds, max(1, width - margin), names_stage)
    lines = []
    for rank, label in enumerate(labels):
        events = sorted((event for event in computing if event.rank == rank), key=lambda event: event.start)
        lanes = (Lane.COMPUTE, Lane.RECOMPUTE) if ran_beside(events) else None
        rows = [[event for event in events if event.lane is lane] for lane in lanes] if lanes else [events]
        copies = [[event for event in timeline.of_rank(rank) if event.lane is lane] for lane in COPY_LANES]
        rows += [row for row in copies if row]
        for place, row in enumerate(rows):
            cells = _cells(row, timeline, columns)
            if place == 0:
                sums = [event for event in timeline.events if event.rank == rank and event.op.kind in REDUCING]
                cells = [cell or one for cell, one in zip(cells, _cells(sums, timeline, columns))]
            lines.append(f"{label if place == 0 else '':<{margin}}{_drawn(cells, names_stage, colour)}")
    return "\n".join(lines)


def legend(kinds: Iterable[Kind], *, colour: bool = False) -> str:
    """What the letters of `kinds` stand for, in one line."""
    words = [
        f"{_painted((kind.value if kind.computes else looks.character) + looks.character, looks, colour)} {looks.word}"
        for kind, looks in drawn_kinds(kinds).items()
    ]
    return "  ".join([*words, ". idle"])


def _columns(events: Sequence[OpEvent], step_seconds: float, room: int, names_stage: bool) -> int:
    """Columns for the step: whole ones per shortest op where that leaves place for its name, else the whole room."""
    shortest = min((event.end - event.start for event in events if event.end > event.start), default=0.0)
    if shortest <= 0.0:
        return room
    longest_name = max(len(_name(event, names_stage)) for event in events)
    per_op = min(int(room * shortest / step_seconds + 1e-9), max(_LABEL_COLUMNS, longest_name))
    return max(1, min(room, round(per_op * step_seconds / shortest))) if per_op >= longest_name else room


def _cells(events: Sequence[OpEvent], timeline: Timeline, columns: int) -> list[OpEvent | None]:
    """Per column the event that covers most of it; None where most is bubble."""
    cells: list[OpEvent | None] = []
    first = 0
    for column in range(columns):
        left, right = (timeline.start + timeline.step_seconds * place / columns for place in (column, column + 1))
        while first < len(events) and events[first].end <= left:
            first += 1
        best, covered, most = None, 0.0, 0.0
        for event in events[first:]:
            if event.start >= right:
                break
            part = min(event.end, right) - max(event.start, left)
            covered += part
            if part > most * (1 + 1e-9):
                best, most = event, part
        cells.append(best if covered >= (right - left) / 2 else None)
    return cells


def _drawn(cells: Sequence[OpEvent | None], names_stage: bool, colour: bool) -> str:
    drawn = ""
    for event, same in itertools.groupby(cells, key=lambda cell: cell):
        columns = len(list(same))
        if event is None:
            drawn += "." * columns
            continue
        kind, name, looks = event.op.kind, _name(event, names_stage), looks_of(event.op.kind)
        if len(name) > columns:
            name = kind.value if kind.computes else ""
        drawn += _painted(name.ljust(columns, " " if colour else looks.character), looks, colour)
    return drawn.rstrip() if colour else drawn


def _name(event: OpEvent, names_stage: bool) -> str:
    if not event.op.kind.computes:
        return str(event.op.microbatch) if event.lane in COPY_LANES else ""
    return str(event.op) if names_stage else str(event.op).removeprefix(str(event.op.stage))


def _painted(text: str, looks: Looks, colour: bool) -> str:
    return f"\x1b[{looks.ansi}m{text}\x1b[0m" if colour else text


@dataclass(frozen=True)
class MeshShown:
    """`unknown` says why figures are missing; "": none is."""

    mesh: Mesh
    unknown: str = ""

    @property
    def title(self) -> str:
        """For example `2 replicas x 4 ranks = 8 ranks on 2 nodes (parallel.order=replica-stage)`."""
        grid, nodes = self.mesh.grid, self.mesh.num_nodes
        ranks = f"{count_of(grid.replica, 'replica')} x {count_of(grid.stage, 'rank')} = {count_of(grid.size, 'rank')}"
        zero = f", parallel.zero_stage={self.mesh.zero}" if self.mesh.zero else ""
        return f"{ranks} on {count_of(nodes, 'node')} (parallel.order={grid.order}{zero})"

    def as_json(self) -> dict[str, Any]:
        return {**self.mesh.as_json(), "unknown": self.unknown}


def draw_mesh(shown: MeshShown) -> str:
    """The ranks as a grid, a line for each, and what crosses nodes."""
    return "\n\n".join([shown.title, mesh_grid(shown.mesh), mesh_table(shown.mesh).as_text(), *mesh_notes(shown)])


def mesh_table(mesh: Mesh) -> Table:
    """A line per rank: what it holds, and what it sends in a step, for example `8: 1.05 MB`."""
    kinds = _kinds_sent(mesh)
    head = ["rank", "node", "replica", "stages", "parameters", "weights", "gradients", "optimizer"]
    rows = [
        [
            str(rank.rank),
            str(rank.node),
            str(rank.replica),
            " ".join(map(str, rank.stages)),
            number(rank.parameters, "{:,}"),
            *map(size, (rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes)),
            *(
                f"{number(one.number, '{:,}')}: {size(one.num_bytes)}" if one else "-"
                for one in map(rank.sent.get, kinds)
            ),
        ]
        for rank in mesh.ranks
    ]
    return Table([*head, *(f"{kind}, sent" for kind in kinds)], rows)


def mesh_notes(shown: MeshShown) -> list[str]:
    """What the columns mean, what crosses nodes, and what is not known; a paragraph each."""
    mesh = shown.mesh
    kinds = _kinds_sent(mesh)
    meanings = "; ".join(f"{kind}: {MESSAGES[kind]}" for kind in kinds)
    notes = [f"Messages and bytes of a step. {meanings[:1].upper()}{meanings[1:]}."] if kinds else []
    if mesh.num_nodes > 1:
        notes.append(f"Between nodes: {_crossing(mesh)}.")
    if shown.unknown:
        notes.append(f"What ranks hold and send is not all known: {shown.unknown}.")
    return notes


def _kinds_sent(mesh: Mesh) -> list[str]:
    return [kind for kind in MESSAGES if any(kind in rank.sent for rank in mesh.ranks)]


def mesh_grid(mesh: Mesh) -> str:
    """A row per replica, a column per place."""
    places = range(mesh.grid.stage)
    held = [mesh.rank_at(0, place).stages for place in places]
    heads = [f"stage{'s' if len(stages) > 1 else ''} {' '.join(map(str, stages))}" for stages in held]
    replicas = range(mesh.grid.replica)
    named = " (node {})" if mesh.num_nodes > 1 else ""
    ranks = {(replica, place): mesh.rank_at(replica, place) for replica in replicas for place in places}
    cells = {at: f"rank {rank.rank}" + named.format(rank.node) for at, rank in ranks.items()}
    width = max(map(len, [*heads, *cells.values()]))
    labels = [f"replica {replica}" for replica in replicas]
    margin = max(map(len, labels)) + 2
    arrow = " " * (_GAP + 2)
    lines = [" " * margin + (arrow.join(head.ljust(width) for head in heads)).rstrip()]
    for replica in replicas:
        if replica:
            lines.append(_below(mesh, replica, margin, width))
        pieces = [cells[replica, 0].ljust(width)]
        for place in places[1:]:
            pieces += [
                _arrow(mesh, ranks[replica, place - 1], ranks[replica, place]),
                cells[replica, place].ljust(width),
            ]
        lines.append(labels[replica].ljust(margin) + "".join(pieces).rstrip())
    return "\n".join(lines)


def _arrow(mesh: Mesh, one: MeshRank, other: MeshRank) -> str:
    """Between neighbours in a replica."""
    if not any({edge.sender, edge.receiver} == {one.rank, other.rank} for edge in mesh.edges):
        return "     "
    return " ==> " if one.node != other.node else " --> "


def _below(mesh: Mesh, replica: int, margin: int, width: int) -> str:
    """What joins `replica` with the one above it: the groups that add up gradients."""
    marks = []
    for place in range(mesh.grid.stage):
        one, other = mesh.rank_at(replica - 1, place), mesh.rank_at(replica, place)
        is_joined = any(one.rank in group.ranks for group in mesh.groups)
        marks.append(" " if not is_joined else "||" if one.node != other.node else "|")
    return (" " * margin + (" " * (_GAP + 2)).join(f"  {mark}".ljust(width) for mark in marks)).rstrip()


def _crossing(mesh: Mesh) -> str:
    """What is sent over the network in a step."""
    between = [sent for edge in mesh.edges if edge.crosses_nodes for sent in edge.sent.values()]
    groups = [group for group in mesh.groups if group.crosses_nodes]
    count = count_of(sum(one.number or 0 for one in between), "message") if between else "no messages"
    messages = f"{count} from stage to stage{_in_all(between)}"
    given = [group.sent for group in groups]
    sums = f"; {len(groups)} of {len(mesh.groups)} groups add up gradients{_in_all(given)}"
    return messages + sums if mesh.groups else messages


def _in_all(sent: Iterable[Sent]) -> str:
    sizes = [one.num_bytes for one in sent]
    known = [one for one in sizes if one is not None]
    return f", {size(sum(known))} in all" if sizes and len(known) == len(sizes) else ""
