"""Proves, before anything runs, that a schedule is complete, cannot hang and stays within its bounds.

One function per rule, in an order in which each may rely on those before it. A rule yields the ops that break it, with
what is wrong. The error shows the first line of the rule's docstring.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from pipetrain.schedule.alive import peak_on_host, peak_sets, peak_stash
from pipetrain.schedule.families import Shape
from pipetrain.schedule.graph import find_cycle
from pipetrain.schedule.grid import grid
from pipetrain.schedule.kinds import (
    COPY_LANES,
    GIVES_GRADIENTS,
    MESSAGE_LANES,
    OFFLOAD,
    PASS_SEQUENCES,
    RECOMPUTE,
    REDUCING,
    RELOAD,
    Direction,
)
from pipetrain.schedule.launches import recomputed_too_early
from pipetrain.schedule.messages import giver_of, partner_of, reads_boundary, send_of, source_of
from pipetrain.schedule.op import Kind, Lane, Op, Queue, queue_of
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.reduce import gradients_of, in_turn, reduces_of
from pipetrain.schedule.schedule import Schedule, in_parts
from pipetrain.schedule.waits import read_by

Violation = tuple[Op, str]  # the op that breaks the rule, and how
Rule = Callable[[Schedule], Iterator[Violation]]
_WITH_PARTS = (RECOMPUTE, OFFLOAD, RELOAD, *PASS_SEQUENCES[Direction.BACKWARD][0])


class ScheduleError(ValueError):
    """A schedule breaks a rule: the message has the rule, the op and the grid with the op marked."""


def check(schedule: Schedule) -> None:
    """Returns if the schedule is sound.

    Raises:
        ScheduleError: the first rule that is broken, by which op.
        ValueError: the policy's numbers are for another number of stages.
    """
    schedule.policy.check_stages(schedule.num_stages)
    for rule in RULES:
        for op, violation in rule(schedule):
            sentence = (rule.__doc__ or rule.__name__).splitlines()[0]
            raise ScheduleError(f"{sentence}\n{op}: {violation}\n{grid(schedule, op)}")


def check_calls(schedule: Schedule, on_call: object) -> None:
    """Refuse, before a run starts, a schedule with a CALL where `on_call`, the function that it calls, is None.

    Raises:
        ValueError: the function is missing.
    """
    call = next((op for _, _, op in schedule.ops() if op.kind.row.calls), None)
    if call is not None and on_call is None:
        raise ValueError(
            f"{call}: pipeline.schedule={schedule.family} calls a function; give it, as in pipeline.on_call=MODULE:FUNCTION"
        )


def violation_of(op: Op, rank: int, shape: Shape) -> str | None:
    """Why `op`, of a generator or a file, may not stand on the compute lane of `rank`; None: it may."""
    if not (op.kind.computes or op.kind.row.lane in COPY_LANES) or op.peer is not None:
        return "is no op of a compute lane; allowed are stage, F, R, B, I, W, OFFLOAD, RELOAD or CALL, and microbatch, as in 2F0"
    return _place_violation(op, rank, shape)


def _place_violation(op: Op, rank: int, shape: Shape) -> str | None:
    """Why `op` may not stand on any lane of `rank`; None: it may."""
    stages, microbatches, has_microbatch = shape.num_stages, shape.num_microbatches, not op.kind.row.per_stage
    if not 0 <= op.stage < stages:
        return f"is of stage {op.stage}; allowed are 0 to {stages - 1} (pipeline.num_stages={stages})"
    if has_microbatch and (op.microbatch is None or not 0 <= op.microbatch < microbatches):
        allowed = f"0 to {microbatches - 1} (pipeline.num_microbatches={microbatches})"
        return f"is of microbatch {op.microbatch}; allowed are {allowed}"
    if shape.stage_ranks[op.stage] != rank:
        return f"stands in the line of rank {rank}, but stage {op.stage} lives on rank {shape.stage_ranks[op.stage]} (pipeline.placement)"
    return _segment_violation(op, shape.parts_of(op.stage)) if has_microbatch else None


def _segment_violation(op: Op, num_parts: int) -> str | None:
    """Why the part of `op` is wrong for a stage with `num_parts` parts: missing, not allowed or too large; None: it is right."""
    may_have = op.kind in _WITH_PARTS and num_parts > 1
    if op.part is None:
        return (
            f"names none of its {num_parts} parts; write which, as in {op}.0"
            if may_have and op.kind in (RECOMPUTE, OFFLOAD, RELOAD)
            else None
        )
    if not may_have:
        return (
            "is no op of a compute lane here: only R, B and copies have parts, where recompute.segments is more than 1"
        )
    return None if op.part < num_parts else f"is of part {op.part}; stage {op.stage} has parts 0 to {num_parts - 1}"


def each_op_once(schedule: Schedule) -> Iterator[Violation]:
    """No op stands in the schedule twice."""
    counts = Counter(op for _, _, op in schedule.ops())
    yield from ((op, f"stands there {count} times") for op, count in counts.items() if count > 1)


def each_op_in_its_place(schedule: Schedule) -> Iterator[Violation]:
    """An op runs on the rank that holds its stage, in the lane of its kind, for a microbatch of the step."""
    overlap = schedule.policy.mode is Mode.OVERLAP
    lanes = {kind: kind.row.lane_in(overlap) for kind in Kind}
    parts = tuple(map(schedule.policy.num_parts, range(schedule.num_stages)))
    shape = Shape(schedule.stage_ranks, schedule.num_microbatches, num_parts=parts)
    for rank, lane, op in schedule.ops():
        per_stage = op.kind.row.per_stage
        if per_stage and (op.microbatch is not None or op.part is None):
            yield op, "is spelled without a bucket; write 3REDUCE_GRAD.0, or 3REDUCE_GRAD.0>0 with another stage"
        elif not per_stage and op.peer is not None:
            yield op, "the executor does not know ops of this form"
        elif (violation := _place_violation(op, rank, shape)) is not None:
            yield op, violation
        elif lanes[op.kind] is not lane:
            yield op, f"{op.kind} belongs into the {lanes[op.kind]} lane, not into {lane}"


def each_forward(schedule: Schedule) -> Iterator[Violation]:
    """Each stage runs one F for each microbatch."""
    yield from _incomplete(schedule, Direction.FORWARD, 0)


def each_backward(schedule: Schedule) -> Iterator[Violation]:
    """For each microbatch a stage runs one B, one B per part, or one I and one W; none if nothing needs a gradient."""
    yield from _incomplete(schedule, Direction.BACKWARD, schedule.first_backward)
    for _, _, op in schedule.ops():
        if op.stage < schedule.first_backward and op.kind in GIVES_GRADIENTS:
            yield op, f"stages below {schedule.first_backward} need no gradient"


def _incomplete(schedule: Schedule, direction: Direction, first_stage: int) -> Iterator[Violation]:
    """Ops that are missing or extra where a microbatch does not pass a stage exactly once in this direction."""
    kinds = {kind for way in PASS_SEQUENCES[direction] for kind in way}
    found: dict[tuple[int, int | None], list[Op]] = {}
    for rank in range(schedule.num_ranks):
        for op in schedule.lane(rank, Lane.COMPUTE):
            if op.kind in kinds:
                found.setdefault((op.stage, op.microbatch), []).append(op)
    for stage in range(first_stage, schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            way, ops = schedule.way(direction, stage, microbatch), found.get((stage, microbatch), [])
            for op in way:
                if op not in ops:
                    yield op, f"is missing: {ops[0]} needs it" if ops and ops[0] in way else "is missing"
            for op in ops:
                if op not in way:
                    yield (
                        op,
                        f"is extra to {' and '.join(map(str, way))}: each microbatch needs exactly one backward: B, B of each part, or I and W",
                    )


def each_set_kept_or_recomputed(schedule: Schedule) -> Iterator[Violation]:
    """Each set is kept from F to the end of its backward, recomputed by one R (one R per part) or copied, as the policy says.

    If R runs in parts, B runs in parts as well. After a kept set B may run whole or in parts.
    """
    present = {op for _, _, op in schedule.ops() if op.kind is RECOMPUTE}
    recomputed = {(op.stage, op.microbatch) for op in present}
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            place, op = (stage, microbatch), Op(stage, RECOMPUTE, microbatch)
            if stage < schedule.first_backward:
                if place in recomputed or place in schedule.kept:
                    yield op, f"stages below {schedule.first_backward} have no B, hence no set"
            elif schedule.policy.mode is Mode.NEVER and place not in schedule.kept:
                yield op, "recompute.mode=never keeps every set, this one is not kept"
            elif place in schedule.kept and place in recomputed:
                yield op, "the set is kept, so there is nothing to recompute"
            elif place not in schedule.kept and place not in schedule.offloaded:
                expected = in_parts(op, schedule.policy.num_parts(stage))
                yield from ((one, "is missing: the set is not kept") for one in expected if one not in present)
                first, *_ = schedule.way(Direction.BACKWARD, stage, microbatch)
                if first.part is None and len(expected) > 1:
                    yield first, "its set is recomputed in parts, so B must run in parts too"
    for stage, microbatch in schedule.kept:
        if not 0 <= stage < schedule.num_stages or not 0 <= microbatch < schedule.num_microbatches:
            yield (
                schedule.way(Direction.FORWARD, stage, microbatch)[0],
                "is said to be kept, but is not in the schedule",
            )


def each_copy_comes_back(schedule: Schedule) -> Iterator[Violation]:
    """A set that goes to host memory comes back by one RELOAD, and is neither kept nor recomputed."""
    present = {op for _, _, op in schedule.ops()}
    reloads = {op for op in present if op.kind is RELOAD}
    recomputed = {(op.stage, op.microbatch) for op in present if op.kind is RECOMPUTE}
    for stage, microbatch in schedule.offloaded:
        for down in in_parts(Op(stage, OFFLOAD, microbatch), schedule.policy.num_parts(stage)):
            up = down._replace(kind=RELOAD)
            if up not in reloads:
                yield up, f"is missing: {down} takes the set to the host"
            if down not in present:
                yield down, "is missing: other parts of the set go to the host"
            if stage < schedule.first_backward or (stage, microbatch) in schedule.kept | recomputed:
                yield down, "the set is kept, recomputed or never read, so there is nothing to copy"
    for up in reloads:
        if (up.stage, up.microbatch) not in schedule.offloaded:
            yield up, "nothing took its set to the host"
    own = {op for op in present if op.kind.computes or op.kind.row.lane in COPY_LANES}
    listed = {op for ops in schedule.order for op in ops}
    yield from (
        (op, "is not both in a lane and in the order of places")
        for op in (own ^ listed if own & reloads or listed else ())
    )


def each_message_has_two_ends(schedule: Schedule) -> Iterator[Violation]:
    """Each tensor that crosses to another rank has one send and one receive, and there are no others."""
    present = {op for _, lane, op in schedule.ops() if lane in MESSAGE_LANES}
    expected = set()
    for _, _, op in schedule.ops():
        send = send_of(schedule, op)
        if send is not None:
            expected |= {send, partner_of(send)}
    yield from ((op, "is missing") for op in sorted(expected - present, key=_reading_order))
    yield from ((op, "moves a tensor that nobody needs") for op in sorted(present - expected, key=_reading_order))


def _reading_order(op: Op) -> tuple[int, str, int, int]:
    return op.stage, op.kind.value, op.microbatch or 0, op.part or 0


def each_shared_gradient(schedule: Schedule) -> Iterator[Violation]:
    """Two stages on two ranks that share a parameter sum its gradients once; no other stages do."""
    yield from _reduces_where(schedule, over_stages=True, unasked="reduces a parameter that no two stages share")


def each_gradient_of_replicas(schedule: Schedule) -> Iterator[Violation]:
    """With several replicas, each stage with a backward sums its gradients over them, one bucket per part; one replica sums nothing."""
    replicas = schedule.num_replicas
    unasked = "there is one replica" if replicas == 1 else f"is no bucket of {replicas} replicas"
    yield from _reduces_where(schedule, over_stages=False, unasked=unasked)


def _reduces_where(schedule: Schedule, *, over_stages: bool, unasked: str) -> Iterator[Violation]:
    present = {op for _, _, op in schedule.ops() if op.kind in REDUCING and (op.peer is not None) == over_stages}
    expected = {op for op in reduces_of(schedule) if (op.peer is not None) == over_stages}
    yield from ((op, "is missing") for op in sorted(expected - present, key=_reading_order))
    yield from ((op, unasked) for op in sorted(present - expected, key=_reading_order))


def each_reduce_in_its_turn(schedule: Schedule) -> Iterator[Violation]:
    """A rank sums gradients over the replicas in the order in which they become ready; within a stage, the last part is first."""
    turns = {op: number for number, op in enumerate(in_turn(schedule))}
    for rank in range(schedule.num_ranks):
        queue = (op for op in schedule.lane(rank, Lane.REDUCE) if op in turns)
        for first, second in itertools.pairwise(queue):
            if turns[first] > turns[second]:
                yield first, f"stands before {second}, which becomes ready before it"


def each_link_in_one_order(schedule: Schedule) -> Iterator[Violation]:
    """Both ends of a link have its messages in the same order, and two ranks have their shared REDUCE_GRAD in the same order."""
    queues: dict[Queue, list[Op]] = {}
    for _, lane, op in schedule.ops():
        if lane in MESSAGE_LANES:
            queues.setdefault(queue_of(lane, op), []).append(op)
    for sent in queues.values():
        if sent[0].kind.row.lane is Lane.SEND:
            to = partner_of(sent[0])
            for send, receive in zip(sent, queues[to.stage, to.kind]):
                if partner_of(send) != receive:
                    yield receive, f"meets {send}"
    reducing = [rank for rank in range(schedule.num_ranks) if schedule.lane(rank, Lane.REDUCE)]
    for one, other in itertools.combinations(reducing, 2):
        for op, met in zip(_reduces_with(schedule, one, other), _reduces_with(schedule, other, one)):
            if partner_of(op) != met:
                yield op, f"meets {met}"


def _reduces_with(schedule: Schedule, rank: int, other: int) -> list[Op]:
    """The REDUCE_GRAD of `rank` whose other end is on rank `other`."""
    ops = schedule.lane(rank, Lane.REDUCE)
    return [op for op in ops if op.peer is not None and schedule.stage_ranks[op.peer] == other]


def each_wait_is_for_an_op(schedule: Schedule) -> Iterator[Violation]:
    """An op of the schedule waits only for ops of its own rank, because an executor does not know the others."""
    home = {op: rank for rank, _, op in schedule.ops()}
    for op, awaited in schedule.waits.items():
        if op not in home:
            yield op, "has waits, but is not in the schedule"
            continue
        for other in awaited:
            if other not in home:
                yield op, f"waits for {other}, which is not in the schedule"
            elif home[other] != home[op]:
                yield op, f"waits for {other}, which is of rank {home[other]}"


def each_op_after_what_it_reads(schedule: Schedule) -> Iterator[Violation]:
    """An op comes after the ops whose results it reads: by the order of its queue, its own wait, or the wait of an op before it."""
    places: dict[Op, tuple[int, int]] = {}  # the number of its queue, and its place there
    queues: dict[tuple[int, Queue], list[Op]] = {}
    numbers: dict[tuple[int, Queue], int] = {}
    for rank, lane, op in schedule.ops():
        queue = rank, queue_of(lane, op)
        ops = queues.setdefault(queue, [])
        places[op] = numbers.setdefault(queue, len(numbers)), len(ops)
        ops.append(op)
    for own, ops in enumerate(queues.values()):
        ended = [-1] * len(queues)  # per queue, the last of its ops that has ended before this one starts
        for number, op in enumerate(ops):
            ended[own] = number - 1  # if it is a message it has only started, but what it waited for has ended
            for awaited in schedule.waits.get(op, ()):
                other, place = places[awaited]
                if place > ended[other]:
                    ended[other] = place
            for source in filter(None, _reads(schedule, op)):
                other, place = places.get(source, (own, -1))  # -1: the microbatch has no op of that kind
                if place > ended[other]:
                    yield op, f"does not wait for {source}"


def _reads(schedule: Schedule, op: Op) -> Iterator[Op | None]:
    """The ops whose results `op` reads; None for a boundary tensor that comes from no op."""
    row = op.kind.row
    if op.kind in REDUCING:
        yield from gradients_of(schedule, op)
    for kind in row.reads:
        yield Op(op.stage, kind, op.microbatch, op.part if op.kind is RELOAD else None)
    if row.lane is Lane.SEND and row.direction is Direction.BACKWARD:
        yield giver_of(schedule, row.direction, op.stage, op.microbatch)
    yield source_of(schedule, op)
    if row.needs_set and op.part is not None and not reads_boundary(schedule, op):
        yield op._replace(part=op.part + 1)
    if row.needs_set and (op.stage, op.microbatch) not in schedule.kept:
        brings = RELOAD if (op.stage, op.microbatch) in schedule.offloaded else RECOMPUTE
        yield Op(op.stage, brings, op.microbatch, op.part)
    if op.kind is RECOMPUTE and schedule.policy.mode is Mode.INLINE:
        yield source_of(schedule, read_by(schedule, op)[0])


def deadlock_free(schedule: Schedule) -> Iterator[Violation]:
    """There is no deadlock, even if each end of a transfer blocks until the other end is ready.

    The two ends of a transfer count as one node, which comes after all that either end waits for. The schedule ends if and
    only if this graph, with the order of the lanes, has no cycle (Kahn 1962).
    """
    yield from _cycle(find_cycle(schedule))


def _cycle(cycle: list[Op]) -> Iterator[Violation]:
    if cycle:
        chain = ", which waits for ".join(str(op) for op in [*cycle[1:], cycle[0]])
        yield cycle[0], f"waits for {chain}"


def each_op_is_launched(schedule: Schedule) -> Iterator[Violation]:
    """A host that launches ops ahead of its device launches each op once, after the ops that it waits for and the op before it in its queue."""
    if not schedule.launch_order:
        return
    home = {op: rank for rank, _, op in schedule.ops()}
    for rank, launched in enumerate(schedule.launch_order):
        seen: set[Op] = set()
        for op in launched:
            if op in seen:
                yield op, "is launched twice"
            elif home.pop(op, None) != rank:
                yield op, f"is launched by rank {rank}, but is no op of it"
            seen.add(op)
    yield from ((op, f"is not launched by rank {rank}") for op, rank in home.items())
    place = {op: number for launched in schedule.launch_order for number, op in enumerate(launched)}
    for op in place:
        for other in schedule.comes_after(op):
            if place[other] > place[op]:
                yield op, f"is launched before {other}"


def launched_in_one_order(schedule: Schedule) -> Iterator[Violation]:
    """There is no deadlock, even if each op also waits for all that its rank launched before it.

    Streams that share a queue of the hardware may wait in this way too. So may transfers: NCCL does not promise to run two at the same time.
    The rule holds if one order of all ops, in which both ends of a transfer are one op, contains the launch order of each rank.
    """
    if schedule.launch_order:
        yield from _cycle(find_cycle(schedule, schedule.launch_order))


def each_recompute_gets_free_memory(schedule: Schedule) -> Iterator[Violation]:
    """An R that is launched after an op that reads a set also runs after that op on the device, because R may get the set's memory."""
    for op, reader in recomputed_too_early(schedule):
        yield op, f"is launched after {reader}, but the device may run it before {reader} has ended"


def sets_within_bounds(schedule: Schedule) -> Iterator[Violation]:
    """A stage never has more sets alive, kept or recomputed, than activation slots (recompute.sets)."""
    for stage, peak in enumerate(peak_sets(schedule)):
        places = schedule.policy.places_of(stage)
        if places is not None and peak.places > places:
            for_stage = f" for stage {stage}" if isinstance(schedule.policy.sets, tuple) else ""
            of = " of one part each" if schedule.policy.in_parts else ""
            fault = f"stage {stage} can have {peak.sets:g} sets alive at once, but only {places} activation slot{'' if places == 1 else 's'}{of}"
            yield peak.op, f"{fault}; use recompute.sets={peak.sets:g}{for_stage}, or an order with fewer"


def host_sets_within_bounds(schedule: Schedule) -> Iterator[Violation]:
    """A stage never has more sets in host memory than it may."""
    for stage in range(schedule.num_stages):
        allowed = schedule.policy.host_sets_of(stage)
        held, op = (0, None) if allowed is None else peak_on_host(schedule, stage)
        if op is not None and allowed is not None and held > allowed:
            yield op, f"stage {stage} can have {held} sets in host memory at once; allowed are {allowed}"


def stash_within_bounds(schedule: Schedule) -> Iterator[Violation]:
    """No stage holds more microbatches between F and the end of their backward than recompute.stash allows."""
    for stage, held in enumerate(peak_stash(schedule)):
        allowed = schedule.policy.stash_of(stage)
        if allowed is not None and held > allowed:
            fault = f"stage {stage} holds {held} microbatches between F and B, allowed are {allowed}"
            fewer = "an order with fewer in flight (pipeline.schedule=1f1b, a smaller pipeline.warmup)"
            first = schedule.way(Direction.FORWARD, stage, 0)[0]
            yield first, f"{fault}; use recompute.stash={held}, or {fewer}"


RULES: tuple[Rule, ...] = (
    each_op_once,
    each_op_in_its_place,
    each_forward,
    each_backward,
    each_set_kept_or_recomputed,
    each_copy_comes_back,
    each_message_has_two_ends,
    each_shared_gradient,
    each_gradient_of_replicas,
    each_reduce_in_its_turn,
    each_link_in_one_order,
    each_wait_is_for_an_op,
    each_op_after_what_it_reads,
    deadlock_free,
    each_op_is_launched,
    launched_in_one_order,
    each_recompute_gets_free_memory,
    sets_within_bounds,
    host_sets_within_bounds,
    stash_within_bounds,
)
