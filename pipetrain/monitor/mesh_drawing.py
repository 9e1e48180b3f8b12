"""The mesh of a run, drawn: who is where, what each rank holds, what goes where. A terminal and a page have the same drawing.

           stage 0         stage 1
replica 0  rank 0   -->    rank 1      --> and | in a node, ==> and || between two
             ||              ||
replica 1  rank 2   -->    rank 3
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from pipetrain.monitor.draw.page import framed, heading, paragraph
from pipetrain.monitor.draw.table import Table, number, size
from pipetrain.plan.mesh import MESSAGES, Mesh, MeshRank, Sent

_MOST_REPLICAS = 12  # drawn; of more, the first ones and the last
_GAP = 3  # between columns of text


@dataclass(frozen=True)
class MeshShown:
    """`unknown` says why figures are missing; "": none is."""

    mesh: Mesh
    unknown: str = ""

    @property
    def title(self) -> str:
        """For example `2 replicas x 4 ranks = 8 ranks on 2 nodes (parallel.order=replica-stage)`."""
        grid, nodes = self.mesh.grid, self.mesh.num_nodes
        ranks = f"{_count(grid.replica, 'replica')} x {_count(grid.stage, 'rank')} = {_count(grid.size, 'rank')}"
        zero = f", parallel.zero_stage={self.mesh.zero}" if self.mesh.zero else ""
        return f"{ranks} on {_count(nodes, 'node')} (parallel.order={grid.order}{zero})"

    def as_json(self) -> dict[str, Any]:
        return {**self.mesh.as_json(), "unknown": self.unknown}


def draw_mesh(shown: MeshShown) -> str:
    """The ranks as a grid, a line for each, and what crosses nodes."""
    return "\n\n".join([shown.title, _grid(shown.mesh), mesh_table(shown.mesh).as_text(), *mesh_notes(shown)])


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


def mesh_html(shown: MeshShown) -> str:
    """Part of a page."""
    drawn = f"<pre>{escape(_grid(shown.mesh))}</pre>"
    notes = map(paragraph, mesh_notes(shown))
    return "\n".join([heading(shown.title), drawn, framed(mesh_table(shown.mesh)), *notes])


def _grid(mesh: Mesh) -> str:
    """A row per replica, a column per place."""
    places = range(mesh.grid.stage)
    held = [mesh.rank_at(0, place).stages for place in places]
    heads = [f"stage{'s' if len(stages) > 1 else ''} {' '.join(map(str, stages))}" for stages in held]
    replicas = list(range(mesh.grid.replica))
    if len(replicas) > _MOST_REPLICAS:
        replicas = [*replicas[: _MOST_REPLICAS - 1], replicas[-1]]
    named = " (node {})" if mesh.num_nodes > 1 else ""
    ranks = {(replica, place): mesh.rank_at(replica, place) for replica in replicas for place in places}
    cells = {at: f"rank {rank.rank}" + named.format(rank.node) for at, rank in ranks.items()}
    width = max(map(len, [*heads, *cells.values()]))
    labels = [f"replica {replica}" for replica in replicas]
    margin = max(map(len, labels)) + 2
    arrow = " " * (_GAP + 2)
    lines = [" " * margin + (arrow.join(head.ljust(width) for head in heads)).rstrip()]
    for row, replica in enumerate(replicas):
        if row:
            lines.append(_below(mesh, replicas[row - 1], replica, margin, width))
        pieces = [cells[replica, 0].ljust(width)]
        for place in places[1:]:
            pieces += [
                _arrow(mesh, ranks[replica, place - 1], ranks[replica, place]),
                cells[replica, place].ljust(width),
            ]
        lines.append(labels[row].ljust(margin) + "".join(pieces).rstrip())
    return "\n".join(lines)


def _arrow(mesh: Mesh, one: MeshRank, other: MeshRank) -> str:
    """Between neighbours in a replica."""
    if not any({edge.sender, edge.receiver} == {one.rank, other.rank} for edge in mesh.edges):
        return "     "
    return " ==> " if one.node != other.node else " --> "


def _below(mesh: Mesh, before: int, after: int, margin: int, width: int) -> str:
    """What joins two replicas that are drawn below each other: the groups that add up gradients."""
    if after != before + 1:
        return f"{'...':<{margin}}{mesh.grid.replica - _MOST_REPLICAS} more replicas"
    marks = []
    for place in range(mesh.grid.stage):
        one, other = mesh.rank_at(before, place), mesh.rank_at(after, place)
        is_joined = any(one.rank in group.ranks for group in mesh.groups)
        marks.append(" " if not is_joined else "||" if one.node != other.node else "|")
    return (" " * margin + (" " * (_GAP + 2)).join(f"  {mark}".ljust(width) for mark in marks)).rstrip()


def _crossing(mesh: Mesh) -> str:
    """What is sent over the network in a step."""
    between = [sent for edge in mesh.edges if edge.crosses_nodes for sent in edge.sent.values()]
    groups = [group for group in mesh.groups if group.crosses_nodes]
    count = _count(sum(one.number or 0 for one in between), "message") if between else "no messages"
    messages = f"{count} from stage to stage{_in_all(between)}"
    given = [group.sent for group in groups]
    sums = f"; {len(groups)} of {len(mesh.groups)} groups add up gradients{_in_all(given)}"
    return messages + sums if mesh.groups else messages


def _in_all(sent: Iterable[Sent]) -> str:
    sizes = [one.num_bytes for one in sent]
    known = [one for one in sizes if one is not None]
    return f", {size(sum(known))} in all" if sizes and len(known) == len(sizes) else ""


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'s' if amount != 1 else ''}"
