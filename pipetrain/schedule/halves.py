"""The pass of `pipeline.split_backward`: each B becomes I, and a W that runs where its stage would otherwise wait.

    1F1B, rank 1 of 3           F0 F1 .  B0=== F2 B1=== F3 B2=== .  B3===
    in halves, three slots      F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    in halves, one slot         F0 F1 R0 I0 W0 F2 R1 I1 W1 F3 R2 I2 W2 R3 I3 W3

A set lives to the end of its W. So the pass first puts each W right behind its I: there sets live shortest. This order decides which sets
are kept. Then the pass moves each W later, into a wait of its stage, or to the position that its family gives it. It never moves a
W behind an op that needs the activation slot of W's set.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pipetrain.schedule.alive import ENDS_SET, OPENS_STASH, brings_set, peak_stash
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import PASS_SEQUENCES, Direction
from pipetrain.schedule.messages import add_messages
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.recompute import with_recompute
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.waits import add_waits

(_WHOLE,), (_TURN, _REST) = PASS_SEQUENCES[Direction.BACKWARD]  # B; I and W

Position = Callable[[Op], float]  # of an op in its rank's order: when it starts, or its place in a lane


def is_split(draft: Schedule) -> bool:
    """Whether the order already has I and W."""
    return any(op.kind is _REST for _, _, op in draft.ops())


def closed_up(draft: Schedule) -> Schedule:
    """`draft` with an I and, right behind it, a W for each of its backwards, whole or in two halves."""

    def lane(ops: Iterable[Op]) -> Iterator[Op]:
        for op in ops:
            if op.kind in (_WHOLE, _TURN):
                yield op._replace(kind=_TURN)
                yield op._replace(kind=_REST)
            elif op.kind is not _REST:
                yield op

    return draft.with_compute([lane(_compute(draft, rank)) for rank in range(draft.num_ranks)])


def orders_of_w(closed: Schedule, costs: Costs, given: Schedule | None = None) -> Iterator[Schedule]:
    """Two orders to choose from. The first has each W where `given` has it, or right behind its I; the second where its rank would wait.

    If an op needs the activation slot that a W holds, that W comes earlier than in `given`.
    """
    if given is None:
        yield closed
        yield _where_ranks_wait(closed, costs, max(peak_stash(closed), default=0))
        return
    number = {op: place for rank in range(given.num_ranks) for place, op in enumerate(_compute(given, rank))}
    # An R, which the generator did not know of, stands with the I that reads its set.
    yield _put_off(closed, _needs(closed, None), lambda op: number[op] if op in number else number[_turn_of(op)])
    yield _where_ranks_wait(closed, costs, max(peak_stash(given), default=0))


def _where_ranks_wait(closed: Schedule, costs: Costs, most: int) -> Schedule:
    """`closed` with each W where its rank would otherwise wait. W keep the order of their I; those without a wait are last.

    A simulated step finds these positions: in it, W are in a lane of their own, which runs when nothing else can. With
    `recompute.mode=never` slots do not limit the sets of a stage, so `most` does. Otherwise all W would move to the end, and
    the last stage of 1F1B would hold every microbatch.
    """
    needs = _needs(closed, most)
    late: list[list[Op]] = []
    lanes = []
    for rank, of_rank in enumerate(closed.lanes):
        late.append([op for op in _compute(closed, rank) if op.kind is _REST])
        rest = tuple(op for op in _compute(closed, rank) if op.kind is not _REST)
        lanes.append({**of_rank, Lane.COMPUTE: rest, Lane.REDUCE: tuple(late[rank])})
    apart = add_waits(add_messages(dataclasses.replace(closed, lanes=tuple(lanes))), closed.transport_ahead)
    waits = {op: (*apart.waits.get(op, ()), *needs.get(op, ())) for op in {*apart.waits, *needs}}
    waits |= {op: (_turn_of(op),) for ops in late for op in ops}
    started = {event.op: event.start for event in simulate(dataclasses.replace(apart, waits=waits), costs).events}
    return _put_off(closed, needs, started.__getitem__)


def _put_off(closed: Schedule, needs: Mapping[Op, Sequence[Op]], position: Position) -> Schedule:
    return closed.with_compute([_merged(_compute(closed, rank), needs, position) for rank in range(closed.num_ranks)])


def _merged(compute: Sequence[Op], needs: Mapping[Op, Sequence[Op]], position: Position) -> Iterator[Op]:
    """One compute lane. Each W is just before the first op that comes after the position of W, or that needs the slot that W frees."""
    waiting: list[Op] = []
    for op in compute:
        if op.kind is _REST:
            waiting.append(op)
            continue
        needed = {rest for one in with_recompute((op,), lambda _: True) for rest in needs.get(one, ())}
        due = [rest for rest in waiting if position(rest) < position(op)]
        for rest in needed.intersection(waiting):  # W of one stage keep their order
            due += [one for one in waiting[: waiting.index(rest) + 1] if one.stage == rest.stage and one not in due]
        waiting = [rest for rest in waiting if rest not in due]
        yield from sorted(due, key=position)
        yield op
    yield from sorted(waiting, key=position)


def _needs(closed: Schedule, most: int | None) -> dict[Op, list[Op]]:
    """For each op that opens a set, the W that must come before it. With K slots, set number n takes the slot that W number n - K frees.

    `recompute.stash` limits F in the same way. If nothing limits the slots, `most` is their number.
    """
    needs: defaultdict[Op, list[Op]] = defaultdict(list)
    overlaps, never = closed.policy.mode is Mode.OVERLAP, closed.policy.mode is Mode.NEVER
    for rank in range(closed.num_ranks):
        sets, stash, ended = defaultdict[int, int](int), defaultdict[int, int](int), defaultdict[int, list[Op]](list)
        compute: Iterable[Op] = _compute(closed, rank)
        if overlaps:  # each R at its latest position, right before the op that reads its set
            compute = with_recompute(compute, lambda op: (op.stage, op.microbatch) not in closed.kept)
        for op in compute:
            stage = op.stage
            if op.kind in ENDS_SET:
                ended[stage].append(op)
            for counts, opens, size in (
                (sets, brings_set(closed, op), most if never else closed.policy.places_of(stage)),
                (stash, op.kind in OPENS_STASH, closed.policy.stash_of(stage)),
            ):
                counts[stage] += opens
                if opens and size is not None and counts[stage] > size:
                    freed = counts[stage] - size
                    needs[op] += ended[stage][freed - 1 : freed]  # none where there is no room at all: `check` says so
    return needs


def _turn_of(op: Op) -> Op:
    return op._replace(kind=_TURN)


def _compute(schedule: Schedule, rank: int) -> tuple[Op, ...]:
    return schedule.lane(rank, Lane.COMPUTE)
