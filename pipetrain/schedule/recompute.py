"""The recompute pass: which sets are kept, which are recomputed, and where each R is in its lane."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set

from pipetrain.schedule.alive import KEEPS_SET, slot_order
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import ComputeLanes
from pipetrain.schedule.graph import op_graph, run_order
from pipetrain.schedule.kinds import COPY_LANES, OFFLOAD, PASS_SEQUENCES, RECOMPUTE, Direction
from pipetrain.schedule.messages import add_messages
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule, in_parts
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.waits import add_waits

Sets = Set[tuple[int, int]]  # (stage, microbatch)

_FIRST_READERS = frozenset(way[0] for way in PASS_SEQUENCES[Direction.BACKWARD])  # of a set


def add_recompute(schedule: Schedule, chosen: Sets = frozenset()) -> Schedule:
    """`schedule` with an R for each set that neither the policy nor `chosen` keeps.

        compute F and B       F0 F1 F2 B0 B1 B2
        never                 the same, all sets kept
        inline, early         F0 F1 F2 R0 B0 R1 B1 R2 B2
        overlap               the same as without R; on the recompute lane R0 R1 R2

        in parts, inline      F0 F1 F2 R0.1 B0.1 R0.0 B0.0 R1.1 B1.1 ...
        in parts, never       F0 F1 F2 B0 B1 B2; with several replicas F0 F1 F2 B0 B1 B2.1 B2.0

    With several replicas, the last B of a stage always runs in parts. Then only the gradients of one part are left to sum
    after it.

    R follows the order of the ops that first read the sets (B, or I), also over several stages of a rank, so that the two lanes
    cannot wait for each other in a cycle. A file or a generator may give R, copies or kept sets. Then these decide, and not
    `chosen`. Copies move to lanes of their own; the compute lanes that contained them become the schedule's `order`.

    Raises:
        ValueError: the schedule has R of sets that the mode or the schedule keeps, or copies although the policy has none.
    """
    backwards = _places(schedule, _FIRST_READERS)
    written = _places(schedule, {RECOMPUTE})
    if schedule.policy.mode is Mode.NEVER and written:
        raise ValueError("recompute.mode=never, but the schedule itself has R; choose another mode or remove them")
    if schedule.kept & written:
        stage, microbatch = min(schedule.kept & written)
        raise ValueError(
            f"{Op(stage, RECOMPUTE, microbatch)} recomputes a set that the schedule itself keeps; remove it"
        )
    offloaded = _places(schedule, {OFFLOAD})
    if offloaded and not schedule.policy.offloads:
        stage, microbatch = min(offloaded)
        raise ValueError(
            f"recompute.offload=none, but the schedule itself has {Op(stage, OFFLOAD, microbatch)}; use recompute.offload=auto"
        )
    if offloaded:
        schedule = dataclasses.replace(schedule, order=tuple(lanes[Lane.COMPUTE] for lanes in schedule.lanes))
    if schedule.policy.mode is Mode.NEVER or written or offloaded or schedule.kept:
        kept = backwards - written - offloaded
    else:
        kept = backwards & chosen
        kept |= kept_at_once(schedule)
    lanes = tuple(_with_lanes(schedule, dict(lanes), kept) for lanes in schedule.lanes)
    return dataclasses.replace(schedule, lanes=lanes, kept=frozenset(kept))


class AllKept(list[list[Op]]):
    """Compute lanes of a generator or a file that also say that all sets are kept, whatever the mode.

    The policy's limits still hold: `sets` must allow all sets that are alive at once.
    """


def keep_all(schedule: Schedule) -> Schedule:
    """`schedule`, which has only F and backwards, with all its sets kept."""
    return dataclasses.replace(schedule, kept=frozenset(_places(schedule, _FIRST_READERS)))


def decides_itself(schedule: Schedule) -> bool:
    """Whether a schedule already has R, copies or kept sets, so that the policy has no choice left."""
    return bool(schedule.kept) or any(op.kind in (RECOMPUTE, OFFLOAD) for _, _, op in schedule.ops())


def _places(schedule: Schedule, kinds: Set[Kind]) -> set[tuple[int, int]]:
    return {(op.stage, op.microbatch or 0) for _, _, op in schedule.ops() if op.kind in kinds}


def _with_lanes(schedule: Schedule, lanes: dict[Lane, tuple[Op, ...]], kept: Sets) -> dict[Lane, tuple[Op, ...]]:
    """The lanes of one rank with R where the mode wants it. R that the schedule already has keep their order."""
    compute = lanes[Lane.COMPUTE]
    if schedule.order:
        lanes = {**lanes, **{lane: tuple(op for op in compute if op.kind.row.lane is lane) for lane in COPY_LANES}}
        compute = tuple(op for op in compute if op.kind.computes)
    elif not any(op.kind is RECOMPUTE for op in compute):

        def wanted(op: Op) -> bool:
            return (op.stage, op.microbatch) not in kept

        compute = tuple(with_recompute(_with_parts(schedule, compute, wanted), wanted))
    if schedule.policy.mode is not Mode.OVERLAP:
        return {**lanes, Lane.COMPUTE: compute}
    recompute = tuple(op for op in compute if op.kind is RECOMPUTE)
    return {**lanes, Lane.COMPUTE: tuple(op for op in compute if op.kind is not RECOMPUTE), Lane.RECOMPUTE: recompute}


def _with_parts(schedule: Schedule, compute: Sequence[Op], wanted: Callable[[Op], bool]) -> Iterator[Op]:
    """`compute`, in which a B per part replaces each `wanted` B and, with several replicas, the last B of each stage."""
    last = {op.stage: op for op in compute if op.kind in _FIRST_READERS}.values() if schedule.num_replicas > 1 else ()
    for op in compute:
        goes_in_parts = op.kind in _FIRST_READERS and op.part is None and (wanted(op) or op in last)
        yield from in_parts(op, schedule.policy.num_parts(op.stage)) if goes_in_parts else (op,)


def with_recompute(compute: Iterable[Op], wanted: Callable[[Op], bool]) -> Iterator[Op]:
    """`compute` with an R before each B, or I, for which `wanted` is true."""
    for op in compute:
        if op.kind in _FIRST_READERS and wanted(op):
            yield Op(op.stage, RECOMPUTE, op.microbatch, op.part)
        yield op


def kept_at_once(schedule: Schedule) -> set[tuple[int, int]]:
    """The sets that the policy keeps because they are `directly_followed`."""
    return {(stage, i) for stage, i in directly_followed(schedule) if schedule.policy.keeps_at_once(stage)}


def directly_followed(schedule: Schedule) -> set[tuple[int, int]]:
    """The sets whose B, or I, comes right after their F on the compute lane: to recompute them would free nothing."""
    found = set()
    for rank in range(schedule.num_ranks):
        compute = schedule.lane(rank, Lane.COMPUTE)
        for first, second in itertools.pairwise(compute):
            same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
            if same and first.kind in KEEPS_SET and second.kind in _FIRST_READERS:
                found.add((first.stage, first.microbatch or 0))
    return found


def hold_back(schedule: Schedule, ordered: Sequence[Sequence[Op]]) -> Schedule:
    """`schedule`, made from the lanes `ordered`. Each R now also waits for the last compute op before it in `ordered`.

        order of a rank           F0 F1 F2 R1 B0 F3 R2 B1 ...
        compute                   F0 F1 F2 B0 F3 B1 ...
        recompute                 R1 R2 ...                     R2 waits for F3, even if a slot is free before

    Without this wait an R starts as soon as a slot is free. If the message of the rank's next op then arrives before the R ends, that
    op starts late. With this wait, no op starts later than if the rank ran all of `ordered`, R too, one op after the other.
    """
    if schedule.policy.mode is not Mode.OVERLAP:
        return schedule  # R stands in the compute lane itself
    waits = dict(schedule.waits)
    for lane in ordered:
        before = None
        for op in lane:
            if op.kind is RECOMPUTE and before is not None:
                waits[op] = tuple(dict.fromkeys((*waits.get(op, ()), before)))
            elif op.kind is not RECOMPUTE and op.kind.computes:
                before = op
    return dataclasses.replace(schedule, waits=waits)


def order_of(schedule: Schedule) -> ComputeLanes:
    """The ops of each rank one after the other. An R of the recompute lane comes after the last compute op that it waits for.

    So `hold_back` with this order adds no wait that `schedule` does not already imply.
    """
    return of_lanes([slot_order(schedule, rank) for rank in range(schedule.num_ranks)])


def of_lanes(lanes: Sequence[Sequence[Op]]) -> ComputeLanes:
    """`lanes` as lists; as `AllKept` if they have no R and no OFFLOAD."""
    own = list(map(list, lanes))
    return own if any(op.kind in (RECOMPUTE, OFFLOAD) for lane in own for op in lane) else AllKept(own)


# Which sets to keep -----------------------------------------------------------------------------------------------------


def kept_patterns(draft: Schedule) -> Iterator[Sets]:
    """Choices of sets to keep: none; then, if the policy and the draft leave a choice, one per pattern, as far as slots allow.

    GPipe, 2 slots                   1F1B with 3 in flight, 2 slots, one of them left to R
    F0 F1 F2 F3 B0 B1 B2 B3          F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 ...
    |___________|                    |________|  |____________|
       |___________|  then R2, R3          R1 here, then R2
    """
    yield frozenset()
    microbatches, policy = draft.num_microbatches, draft.policy
    stages = range(draft.first_backward, draft.num_stages)
    if decides_itself(draft) or not policy.keeps or policy.mode is Mode.NEVER or not stages:
        return
    places, parts = (max(of(stage) or 0 for stage in stages) for of in (policy.places_of, policy.num_parts))
    for for_recompute in range(min(places, _MOST_FOR_RECOMPUTE + 1)):
        kept = max(1, (places - for_recompute) // parts)
        patterns: list[Container[int]] = [range(start, microbatches) for start in (0, 1, 2, microbatches // 2)]
        patterns += [range(0, microbatches, period) for period in (2, 3)]
        patterns += [{i for i in range(microbatches) if i * kept % microbatches < kept}]  # evenly spread
        yield from (fill_places(draft, for_recompute, pattern) for pattern in patterns)
        yield fill_places(draft, for_recompute, range(microbatches), from_the_end=True)


_MOST_FOR_RECOMPUTE = 1  # slots that a pattern leaves to R alone: with more, R hardly runs earlier


def fill_places(
    draft: Schedule, for_recompute: int, wanted: Container[int], *, from_the_end: bool = False
) -> frozenset[tuple[int, int]]:
    """Keeps each wanted set for which its stage has a free activation slot. `from_the_end`: the last one first.

    Each stage leaves `for_recompute` of its slots to R at any time; a slot holds a set or a part of one. With 0, kept sets may
    fill all slots, but each set that is not kept must still find a slot just before its first reader.
    """
    kept: set[tuple[int, int]] = set()
    at_once = kept_at_once(draft)
    for stage in range(draft.first_backward, draft.num_stages):
        pool = _Places(draft, stage, for_recompute)
        for microbatch in sorted(i for one, i in at_once if one == stage):
            pool.keep(microbatch)
        order: Iterable[int] = reversed(pool.microbatches) if from_the_end else pool.microbatches
        kept |= {(stage, i) for i in order if i in wanted and (stage, i) not in at_once and pool.keep(i)}
    return frozenset(kept)


class _Places:
    """How many activation slots of one stage are taken while each of its ops runs, in the order of its compute lane.

    A recomputed set needs at least one slot from its first reader to its last op; its parts use it one after the other. A kept
    set needs a slot per part, from its F. R can wait until just before the first reader, so its set counts only from there.
    """

    def __init__(self, draft: Schedule, stage: int, for_recompute: int) -> None:
        own = [op for op in draft.lane(draft.stage_ranks[stage], Lane.COMPUTE) if op.stage == stage]
        number = {op: place for place, op in enumerate(own)}
        size = draft.policy.places_of(stage)
        assert size is not None, "recompute.mode=never keeps all sets"
        self._size = size
        self._per_set = draft.policy.num_parts(stage)
        self._most_kept = size - for_recompute
        self._needed = [0] * len(own)
        self._kept = [0] * len(own)
        self._lives: dict[int, tuple[int, int, int]] = {}  # per microbatch the positions of F, first reader, last op
        for op in own:
            if op.kind in KEEPS_SET:
                way = draft.way(Direction.BACKWARD, stage, op.microbatch)
                read, end = number.get(way[0], len(own)), number.get(way[-1], len(own) - 1)
                self._lives[op.microbatch or 0] = (number[op], read, end)
                for place in range(read, end + 1):
                    self._needed[place] += 1
        self.microbatches = list(self._lives)

    def keep(self, microbatch: int) -> bool:
        """Keep a set if that leaves enough slots for the others. Returns whether it is kept."""
        start, read, end = self._lives[microbatch]
        before, then = self._per_set, self._per_set - 1  # slots more than a recomputed set: before, after its R
        if max(self._needed[start:read], default=0) + before > self._size:
            return False
        if then and max(self._needed[read : end + 1], default=0) + then > self._size:
            return False
        if max(self._kept[start : end + 1], default=0) + self._per_set > self._most_kept:
            return False
        for place in range(start, end + 1):
            self._needed[place] += before if place < read else then
            self._kept[place] += self._per_set
        return True


# R into gaps (recompute.mode=early) -------------------------------------------------------------------------------------------


def has_gaps_for_r(schedule: Schedule) -> bool:
    """Whether `into_gaps` can move an R: with one slot, no R can start before the B in front of it ends."""
    places = (schedule.policy.places_of(stage) or 0 for stage in range(schedule.num_stages))
    return schedule.policy.mode is Mode.EARLY and max(places) > 1


def into_gaps(schedule: Schedule, costs: Costs) -> Schedule:
    """`schedule` with each R where it would start in a lane of its own: where its rank waits and a slot is free.

        one slot      F0 F1 F2 R0 .  .  B0 R1 B1 R2 B2
        two slots     F0 F1 F2 R0 R1 .  B0 B1 R2 B2

    A simulated step with `recompute.mode=overlap` finds these positions. Messages and waits are not made again.
    """
    policy = dataclasses.replace(schedule.policy, mode=Mode.OVERLAP)
    beside = add_messages(add_recompute(dataclasses.replace(schedule, policy=policy)))
    beside = add_waits(beside, schedule.transport_ahead)
    graph = op_graph(beside)
    started = {event.op: event.start for event in simulate(beside, costs).events}
    compute: list[list[Op]] = [[] for _ in schedule.lanes]
    for place in run_order(graph, [started[op] for op in graph.ops]):
        if graph.ops[place].kind.computes:
            compute[graph.ranks[place]].append(graph.ops[place])
    return schedule.with_compute(compute)
