"""The clocks of a rank's streams against the definition: one op comes after another if a path of waits leads to it."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from pipetrain.comm.lanes import Ahead
from pipetrain.schedule.op import Kind, Lane, Op

SEND = (0, Kind.SEND_F)
LINES: tuple[Hashable, ...] = (Lane.COMPUTE, Lane.RECOMPUTE, SEND, (0, Kind.RECV_B))


class Definition:
    """Ops with what they come after, as sets; an op comes after those before it on its line and what its line waited for."""

    def __init__(self) -> None:
        self.before: dict[Op, set[Op]] = {}
        self.given: dict[Hashable, set[Op]] = {line: set() for line in LINES}  # what a line comes after

    def launch(self, line: Hashable, op: Op, waits: list[Op]) -> None:
        for awaited in waits:
            self.given[line] |= self.before[awaited] | {awaited}
        self.before[op] = set(self.given[line])
        self.given[line].add(op)


@pytest.mark.parametrize("seed", range(30))
def test_what_comes_after_what(seed: int) -> None:
    draw = random.Random(seed)
    ahead, definition = Ahead(), Definition()
    computed: list[Op] = []
    let_go: list[Op] = []
    sent: list[Op] = []
    launched: list[Op] = []
    for number in range(60):
        line, op = draw.choice(LINES), Op(0, Kind.F, number)
        waits = draw.sample(launched, min(len(launched), draw.randrange(3)))
        ahead.launch(line, waits)
        if line is Lane.COMPUTE:
            expected = {one for one in sent if any(one == late or one in definition.before[late] for late in waits)}
            expected |= {one for one in sent if one in definition.given[line]}
            assert set(let_go) == expected | set(let_go), f"held although compute comes after it, at {number}"
            assert set(let_go) <= expected, f"let go of too early, at {number}"
        ahead.end(line, op)
        definition.launch(line, op, waits)
        launched.append(op)
        if line is Lane.COMPUTE:
            computed.append(op)
        if line == SEND:
            sent.append(op)
            ahead.hold(line, op, lambda op=op: let_go.append(op))  # type: ignore[misc]
        for one in LINES:
            for moment in range(len(computed) + 1):
                expected_now = set(computed[:moment]) <= definition.given[one]
                assert ahead.comes_after(one, moment) == expected_now, f"{one} at {moment}, after {number} ops"
    ahead.join()
    assert let_go == sent, "each is let go of once, in order"
    assert all(ahead.comes_after(line, len(computed)) for line in LINES)


def test_what_is_let_go_of_while_an_op_is_launched_was_read_by_it() -> None:
    ahead = Ahead()
    moments: list[int] = []
    ahead.watch(moments.append)
    ahead.launch(Lane.COMPUTE, ())
    ahead.launch(SEND, ())  # inside the op
    ahead.end(Lane.COMPUTE, Op(0, Kind.F, 0))
    ahead.launch(SEND, ())
    assert moments == [0, 1, 1]


def test_ops_of_the_next_step_are_other_ops() -> None:
    ahead = Ahead()
    op = Op(0, Kind.F, 0)
    ahead.launch(Lane.COMPUTE, ())
    ahead.end(Lane.COMPUTE, op)
    ahead.join()
    ahead.launch(Lane.COMPUTE, ())
    ahead.launch(SEND, (op,))  # not launched yet in this step
    assert ahead.comes_after(SEND, 1)
    assert not ahead.comes_after(SEND, 2)
