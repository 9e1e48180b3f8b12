"""The mesh of a run as text, as a picture and as part of a page: who is where, what each rank holds, what goes where.

           stage 0         stage 1
replica 0  rank 0   -->    rank 1      --> and | in a node, ==> and || between two
             ||              ||
replica 1  rank 2   -->    rank 3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pipetrain.plan.mesh import MESSAGES, Mesh, MeshRank, Sent
from pipetrain.timeline.draw.page import framed, heading, paragraph
from pipetrain.timeline.draw.palette import LOOKS, THEME
from pipetrain.timeline.draw.table import Table, number, size

_MOST_REPLICAS = 12  # drawn; of more, the first ones and the last
_MEANING = (
    "Across: activations and gradients, microbatch by microbatch. Down: gradients added up. Thick: between nodes."
)
_GAP = 3  # between columns of text
_WIDE, _HIGH, _ACROSS, _DOWN, _LEFT, _TOP = 132, 44, 54, 38, 96, 84  # pixels: a rank, the room around it, the margins


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
        zero = f", parallel.zero={self.mesh.zero}" if self.mesh.zero else ""
        return f"{ranks} on {_count(nodes, 'node')} (parallel.order={grid.order}{zero})"

    def as_json(self) -> dict[str, Any]:
        return {**self.mesh.as_json(), "unknown": self.unknown}


def draw_mesh(shown: MeshShown) -> str:
    """The ranks as a grid, a line for each, and what crosses nodes."""
    return "\n\n".join([shown.title, _grid(shown.mesh), mesh_table(shown.mesh).as_text(), *mesh_notes(shown)])


def mesh_table(mesh: Mesh) -> Table:
    """A line per rank: what it holds, and what it sends in a step."""
    kinds = [kind for kind in MESSAGES if any(kind in rank.sent for rank in mesh.ranks)]
    head = ["rank", "node", "replica", "stages", "parameters", "weights", "gradients", "optimizer"]
    rows = [
        [
            str(rank.rank),
            str(rank.node),
            str(rank.replica),
            " ".join(map(str, rank.stages)),
            number(rank.parameters, "{:,}"),
            *map(size, (rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes)),
            *(_sent(rank.sent.get(kind)) for kind in kinds),
        ]
        for rank in mesh.ranks
    ]
    return Table([*head, *(f"{kind}, sent" for kind in kinds)], rows)


def mesh_notes(shown: MeshShown) -> list[str]:
    """What the columns mean, what crosses nodes, and what is not known; a paragraph each."""
    mesh = shown.mesh
    kinds = [kind for kind in MESSAGES if any(kind in rank.sent for rank in mesh.ranks)]
    meanings = "; ".join(f"{kind}: {MESSAGES[kind]}" for kind in kinds)
    notes = [f"Messages and bytes of a step. {meanings[:1].upper()}{meanings[1:]}."] if kinds else []
    if mesh.num_nodes > 1:
        notes.append(f"Between nodes: {_crossing(mesh)}.")
    if shown.unknown:
        notes.append(f"What ranks hold and send is not all known: {shown.unknown}.")
    return notes


def mesh_html(shown: MeshShown) -> str:
    """Part of a page."""
    return "\n".join(
        [
            heading(shown.title),
            f'<div class="table">{meshes_svg([shown])}</div>',
            framed(mesh_table(shown.mesh)),
            *map(paragraph, mesh_notes(shown)),
        ]
    )


def meshes_svg(meshes: Sequence[MeshShown]) -> str:
    """One picture, of several below each other: a row per replica, a box per rank; what crosses nodes is drawn thick."""
    pieces: list[str] = []
    top = width = 0
    for one in meshes:
        replicas = _drawn_replicas(one.mesh)
        pieces += _panel(one, replicas, top)
        top += _TOP + len(replicas) * (_HIGH + _DOWN)
        width = max(width, _LEFT + one.mesh.grid.stage * (_WIDE + _ACROSS), 7 * max(len(one.title), len(_MEANING)) + 32)
    shape = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    font = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="{font}" font-size="13" role="img">',
            f"<title>{escape('; '.join(one.title for one in meshes))}</title>",
            f"<style>{THEME}</style>",
            *pieces,
            "</svg>\n",
        ]
    )


# The grid as text --------------------------------------------------------------------------------------------------


def _grid(mesh: Mesh) -> str:
    """A row per replica, a column per place."""
    places = range(mesh.grid.stage)
    heads = [_stages(mesh.rank_at(0, place)) for place in places]
    replicas = _drawn_replicas(mesh)
    cells = {at: _cell(mesh, at) for at in ((replica, place) for replica in replicas for place in places)}
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
            pieces += [f" {_arrow(mesh, replica, place)} ", cells[replica, place].ljust(width)]
        lines.append(labels[row].ljust(margin) + "".join(pieces).rstrip())
    return "\n".join(lines)


def _drawn_replicas(mesh: Mesh) -> list[int]:
    replicas = list(range(mesh.grid.replica))
    return replicas if len(replicas) <= _MOST_REPLICAS else [*replicas[: _MOST_REPLICAS - 1], replicas[-1]]


def _cell(mesh: Mesh, at: tuple[int, int]) -> str:
    rank = mesh.rank_at(*at)
    return f"rank {rank.rank}" + (f" (node {rank.node})" if mesh.num_nodes > 1 else "")


def _stages(rank: MeshRank) -> str:
    return f"stage{'s' if len(rank.stages) > 1 else ''} {' '.join(map(str, rank.stages))}"


def _arrow(mesh: Mesh, replica: int, place: int) -> str:
    """Between a rank and the one before it in the replica."""
    one, other = mesh.rank_at(replica, place - 1), mesh.rank_at(replica, place)
    edges = _edges_between(mesh, one.rank, other.rank)
    return "   " if not edges else "==>" if one.node != other.node else "-->"


def _below(mesh: Mesh, before: int, after: int, margin: int, width: int) -> str:
    """What joins two replicas that are drawn below each other: the groups that add up gradients."""
    if after != before + 1:
        return f"{'...':<{margin}}{mesh.grid.replica - _MOST_REPLICAS} more replicas"
    marks = [_joint(mesh, before, after, place) for place in range(mesh.grid.stage)]
    return (" " * margin + (" " * (_GAP + 2)).join(f"  {mark}".ljust(width) for mark in marks)).rstrip()


def _joint(mesh: Mesh, before: int, after: int, place: int) -> str:
    if not any(mesh.rank_at(before, place).rank in group.ranks for group in mesh.groups):
        return " "
    return "||" if mesh.rank_at(before, place).node != mesh.rank_at(after, place).node else "|"


def _edges_between(mesh: Mesh, one: int, other: int) -> bool:
    return any({edge.sender, edge.receiver} == {one, other} for edge in mesh.edges)


def _sent(sent: Sent | None) -> str:
    """For example `8: 1.05 MB`."""
    if sent is None:
        return "-"
    return f"{number(sent.number, '{:,}')}: {size(sent.num_bytes)}"


def _crossing(mesh: Mesh) -> str:
    """What is sent over the network in a step."""
    between = [sent for edge in mesh.edges if edge.crosses_nodes for sent in edge.sent.values()]
    groups = [group for group in mesh.groups if group.crosses_nodes]
    count = _count(sum(one.number or 0 for one in between), "message")
    messages = f"{count} from stage to stage{_in_all(between)}" if between else "no messages from stage to stage"
    if not mesh.groups:
        return messages
    given = [group.sent for group in groups]
    return f"{messages}; {len(groups)} of {len(mesh.groups)} groups add up gradients{_in_all(given)}"


def _in_all(sent: Iterable[Sent]) -> str:
    sizes = [one.num_bytes for one in sent]
    known = [one for one in sizes if one is not None]
    return f", {size(sum(known))} in all" if sizes and len(known) == len(sizes) else ""


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'s' if amount != 1 else ''}"


# The grid as a picture ---------------------------------------------------------------------------------------------


def _panel(shown: MeshShown, replicas: Sequence[int], top: int) -> list[str]:
    mesh = shown.mesh
    pieces = [
        f'<text class="text" x="16" y="{top + 22}" font-size="15" font-weight="600">{escape(shown.title)}</text>',
        f'<text class="faint" x="16" y="{top + 42}">{_MEANING}</text>',
    ]
    for place in range(mesh.grid.stage):
        x, _ = _corner(0, place, top)
        head = _stages(mesh.rank_at(0, place))
        pieces.append(
            f'<text class="faint" x="{x + _WIDE / 2:g}" y="{top + _TOP - 12}" text-anchor="middle">{head}</text>'
        )
    for row, replica in enumerate(replicas):
        for place in range(mesh.grid.stage):
            pieces += _box(mesh, replica, place, _corner(row, place, top))
            if place and _edges_between(mesh, *(mesh.rank_at(replica, one).rank for one in (place - 1, place))):
                x, y = _corner(row, place, top)
                crosses = mesh.rank_at(replica, place - 1).node != mesh.rank_at(replica, place).node
                pieces.append(_stroke((x - _ACROSS + 4, y + _HIGH / 2), (x - 4, y + _HIGH / 2), crosses, "forward"))
        _, y = _corner(row, 0, top)
        pieces.append(f'<text class="text" x="16" y="{y + _HIGH / 2 + 4.5:g}">replica {replica}</text>')
        if row:
            pieces += _joints(mesh, replicas[row - 1], replica, row, top)
    return pieces


def _corner(row: int, place: int, top: int) -> tuple[int, int]:
    return _LEFT + place * (_WIDE + _ACROSS), top + _TOP + row * (_HIGH + _DOWN)


def _box(mesh: Mesh, replica: int, place: int, corner: tuple[int, int]) -> list[str]:
    rank, (x, y) = mesh.rank_at(replica, place), corner
    held = "" if rank.parameters is None else f", {rank.parameters:,} parameters"
    state = "" if rank.optimizer_bytes is None else f", optimizer {size(rank.optimizer_bytes)}"
    words = f"rank {rank.rank}: node {rank.node}, replica {replica}, {_stages(rank)}{held}{state}"
    node = f"node {rank.node}" if mesh.num_nodes > 1 else ""
    tone = 0.16 + 0.2 * (rank.node % 2)  # ranks of one node look alike, those of the next another way
    look = f'width="{_WIDE}" height="{_HIGH}" rx="5" fill="{LOOKS["forward"].fill}" fill-opacity="{tone:g}"'
    return [
        f'<rect x="{x}" y="{y}" {look}><title>{escape(words)}</title></rect>',
        f'<text class="text" x="{x + 10}" y="{y + 19}">rank {rank.rank}</text>',
        f'<text class="faint" x="{x + 10}" y="{y + 36}" font-size="11">{node}</text>',
    ]


def _joints(mesh: Mesh, before: int, after: int, row: int, top: int) -> list[str]:
    pieces = []
    for place in range(mesh.grid.stage):
        joint = _joint(mesh, before, after, place)
        x, y = _corner(row, place, top)
        if joint != " ":
            begin, end = (x + _WIDE / 2, y - _DOWN + 4), (x + _WIDE / 2, y - 4)
            pieces.append(_stroke(begin, end, joint == "||", "backward"))
    if after != before + 1:
        _, y = _corner(row, 0, top)
        pieces.append(f'<text class="faint" x="16" y="{y - 12}">... {mesh.grid.replica - _MOST_REPLICAS} more</text>')
    return pieces


def _stroke(begin: tuple[float, float], end: tuple[float, float], is_thick: bool, looks: str) -> str:
    return (
        f'<line x1="{begin[0]:g}" y1="{begin[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{LOOKS[looks].fill}"'
        f' stroke-width="{6 if is_thick else 2}"/>'
    )
