"""One row per kind of op, and nobody who asks for a kind by its name."""

import ast
import dataclasses
from pathlib import Path

import pytest

from pipetrain.config.records import CostConfig
from pipetrain.monitor.draw.palette import LOOKS
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import (
    COPY_LANES,
    MESSAGE_LANES,
    PASS_SEQUENCES,
    REDUCING,
    TRANSFER_LANES,
    Direction,
    Holding,
    Kind,
    Lane,
)
from pipetrain.schedule.op import Op

PACKAGE = Path(__file__).parents[2] / "pipetrain"
# the rows; what a family is; what runs ops
NAMES_KINDS = ("schedule/kinds.py", "schedule/families.py", "runtime/", "comm/")


def test_nobody_names_a_kind() -> None:
    assert [
        f"{path}, line {node.lineno}: Kind.{node.attr}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(NAMES_KINDS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Kind"
        if node.attr in Kind.__members__
    ] == []


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.row.cost is not None])
def test_what_runs_has_a_cost_that_can_be_given(kind: Kind) -> None:
    row = kind.row
    assert row.cost in {field.name for field in dataclasses.fields(Costs)}
    key = "hop_seconds" if row.peer_kind and row.direction else f"{row.cost}_seconds"
    assert key in {field.name for field in dataclasses.fields(CostConfig)}
    assert len(Costs.spread(3).of(kind)) == 3
    if row.per_stage:
        assert Op.parse(f"2{kind}.1>0") == Op(2, kind, None, 1, 0)
    else:
        assert Op.parse(f"2{kind}1") == Op(2, kind, 1)


def test_what_computes_copies_or_adds_up_is_drawn_and_the_rest_is_not() -> None:
    drawn = {kind for kind in Kind if kind.computes or kind in REDUCING or kind.row.lane in COPY_LANES}
    assert {kind.row.looks for kind in drawn} == set(LOOKS)
    assert all(kind.row.looks is None for kind in Kind if kind not in drawn)


def test_messages_meet() -> None:
    for kind in Kind:
        row = kind.row
        assert (row.peer_kind is not None) == (row.lane in TRANSFER_LANES and row.cost is not None)
        if row.peer_kind is not None:
            assert row.peer_kind.row.peer_kind is kind
            assert row.peer_kind.row.direction is row.direction
            assert row.per_stage or {row.lane, row.peer_kind.row.lane} == set(MESSAGE_LANES)
        for message, lane in ((row.recv_kind, Lane.RECV), (row.send_kind, Lane.SEND)):
            assert message is None or (message.row.lane is lane and message.row.direction is row.direction)


def test_each_way_takes_gives_and_closes_once() -> None:
    for way in PASS_SEQUENCES[Direction.FORWARD]:
        assert Holding.STASH in way[0].row.allocates
    for direction, ways in PASS_SEQUENCES.items():
        for first, *rest in ways:
            assert first.row.direction is direction
            assert first.row.recv_kind is not None
            assert first.row.send_kind is not None
            assert all(kind.row.direction is None for kind in rest)
    for way in PASS_SEQUENCES[Direction.BACKWARD]:
        assert [bool(kind.row.frees) for kind in way] == [False] * (len(way) - 1) + [True]
        assert all(kind.row.needs_set for kind in way)
