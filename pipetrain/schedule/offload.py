"""Decides for each set whether it stays on the device, goes to host memory or is recomputed, along a simulated step.

    rank 0 F0-F1-.........B0====R1~B1====F2-.........B2====     one activation slot; a copy takes twice as long as F
           ...0vvvvv.......................................     OFFLOAD of set 0
           .........0^^^^^.................................     RELOAD of set 0. Set 1 is recomputed, set 2 is kept

A kept set holds a slot from F to the end of B, a recomputed set from R on. An offloaded set holds one from F to the end of
OFFLOAD, and again from the start of RELOAD. RELOAD waits only for OFFLOAD and a free slot. Copies run beside compute ops. A set
is *missing* before its B if it is on the host, on the way there, or dropped (R must bring it).

The order of F and backwards is given. The rule goes through time, event by event, and decides as late as it can:

    [1] F takes a free slot, but not the last one if the next missing set needs it before F's set could be copied to the host.
        If F takes no slot, its set is dropped; with `offload=always` F waits for a slot instead.
    [2] OFFLOAD starts when its lane is free. It takes the set, of those held since F, that is read last, if ops before that set's B
        need more slots than are free, and the B is at least `margin` copy times away. So sets whose B is near stay.
    [3] RELOAD, when its lane is free: the next missing set on the host, in the order of B, `early` copies before it must start.
    [4] R of the next dropped set, when the rank can run nothing else.

A B is due at the time at which it starts in a step that keeps all sets. [3] and [4] leave the last slot to the first missing set. If
sets that are read after it hold all slots, the one read last is offloaded or dropped. So the first missing set gets a slot.
`Schedule.order` has the ops of a rank in the order in which they take and free slots. `waits.py` derives the waits from it,
`check` proves that no timing takes more slots (`alive.py`), and the CSV file stores it.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipetrain.schedule.alive import ENDS_SET, KEEPS_SET
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import ComputeLanes
from pipetrain.schedule.kinds import COPY_LANES, FORWARD, OFFLOAD, RECOMPUTE, RELOAD, Direction
from pipetrain.schedule.messages import add_messages, giver_of, writes_boundary
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode, Offload, RecomputePolicy
from pipetrain.schedule.recompute import directly_followed, keep_all, of_lanes
from pipetrain.schedule.schedule import Schedule, in_parts
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.waits import add_waits

_SAME_MOMENT = 1 + 1e-12  # as in `simulate`
_Pair = tuple[int, int]  # a set of a stage: the position in the lane of the op that reads it first, and its microbatch


@dataclass(frozen=True)
class CopyRule:
    """In durations of a copy, `margin`: how long a set must stay unused to be offloaded; `early`: the lead of RELOAD in [3]."""

    margin: float = 2.0
    early: float = 0.0


@dataclass(frozen=True)
class Placed:
    """`lanes` are the ops of each rank, as `Schedule.order` has them; `seconds` is the end of the last op."""

    lanes: ComputeLanes
    seconds: float
    starts: Mapping[Op, float]


def rules_of_copies() -> Iterator[CopyRule]:
    """Rules to try, the likely ones first."""
    return (CopyRule(margin, early) for early, margin in itertools.product((0.0, 0.5), (2.0, 3.0)))


class _Where(enum.Enum):
    """Where a set is between its F and its backward."""

    HELD = "on the device since F"
    BACK = "on the device again, or on its way"  # on its way: its R or RELOAD runs, after which it is READY
    READY = "on the device again"
    GOING = "on its way to the host"
    HOST = "on the host"
    GONE = "nowhere: R has to bring it"


class _Stage:
    """The sets of one stage, in the order of their B. `gone`: dropped. `away`: on the host or the way there. `held`:
    on the device since F. `free` and `host` count the sets for which the device and the host still have room."""

    def __init__(self, places: int, host: int) -> None:
        self.free, self.host = places, host
        self.gone: list[_Pair] = []
        self.away: list[_Pair] = []
        self.held: list[_Pair] = []
        self.where: dict[int, _Where] = {}

    @property
    def missing(self) -> list[_Pair]:
        """A list with the first missing set; empty if no set is missing."""
        return min(self.gone[:1], self.away[:1]) if self.gone and self.away else self.gone[:1] or self.away[:1]

    def lose(self, pair: _Pair, where: _Where) -> None:
        self.where[pair[1]] = where
        bisect.insort(self.gone if where is _Where.GONE else self.away, pair)

    def next_of(self, missing: list[_Pair]) -> _Pair | None:
        """The first of `missing` that may take a slot; None: there is none, or no slot but that of the first missing set."""
        pair = next((pair for pair in missing if self.where[pair[1]] is not _Where.GOING), None)
        return pair if pair is not None and self.free > (self.missing != [pair]) else None

    def bring(self, pair: _Pair) -> None:
        self.free -= 1
        (self.gone if self.where[pair[1]] is _Where.GONE else self.away).remove(pair)
        self.where[pair[1]] = _Where.BACK


class _Rank:
    """What a rank does now and next. `late`: how many seconds after its due time the last op of its lane started."""

    def __init__(self, lane: Sequence[Op]) -> None:
        self.lane = lane
        self.next = 0
        self.late = 0.0
        self.is_busy = False
        self.copies: dict[Lane, tuple[float, int]] = {}  # under way: when each ends, and of which stage it is
        self.order: list[Op] = []


class Placing:
    """The facts of a draft, whose compute lanes have only F, backwards and CALL. `place` runs a rule on them."""

    def __init__(self, draft: Schedule, costs: Costs, ready: Mapping[Op, float] | None = None) -> None:
        """`ready`: when each op may begin, for a draft of one stage alone. None: when its tensor has arrived."""
        self.draft, self.costs, self.ready = draft, costs, ready or {}
        self.due = ready or _starts_if_kept(draft, costs)
        self.at_once = set() if ready else directly_followed(draft)
        self.number: dict[Op, int] = {}  # of each op in its lane
        self.forwards: list[list[int]] = [[] for _ in range(draft.num_stages)]  # their numbers
        self.readers: dict[tuple[int, int], Op] = {}  # of sets: the first op that reads each
        self.feeds: dict[Op, Op] = {}  # what reads the tensor that an op gives
        for rank in range(draft.num_ranks):
            for number, op in enumerate(draft.lane(rank, Lane.COMPUTE)):
                self.number[op] = number
                self._add(op, number)
        self.fed = set(self.ready or self.feeds.values())

    def _add(self, op: Op, number: int) -> None:
        draft, direction = self.draft, op.kind.row.direction
        if op.kind in KEEPS_SET:
            self.forwards[op.stage].append(number)
            if op.stage >= draft.first_backward:
                self.readers[op.stage, op.microbatch or 0] = draft.way(Direction.BACKWARD, op.stage, op.microbatch)[0]
        if not self.ready and direction is not None and 0 <= op.stage - direction < draft.num_stages:
            self.feeds[giver_of(draft, direction, op.stage - direction, op.microbatch)] = op

    def place(self, rule: CopyRule) -> Placed:
        """The order that one rule makes."""
        run = _Placement(self, rule)
        seconds = run.to_end()
        lanes = of_lanes([list(_with_parts(rank.order, self.draft.policy)) for rank in run.ranks])
        return Placed(lanes, seconds, run.starts)


class _Placement:
    """One run of a rule: a heap of moments. At each, an op of a rank ends or a rank checks whether it can begin one."""

    def __init__(self, facts: Placing, rule: CopyRule) -> None:
        draft, policy = facts.draft, facts.draft.policy
        self._facts, self._rule, self._costs = facts, rule, facts.costs
        self._stage_ranks, self._mode = draft.stage_ranks, policy.mode
        self._always = policy.offload is Offload.ALWAYS
        self._seconds = {kind: facts.costs.of(kind) for kind in Kind}
        self.ranks = [_Rank(draft.lane(rank, Lane.COMPUTE)) for rank in range(draft.num_ranks)]
        most = draft.num_microbatches
        self._stages = [
            _Stage(
                (policy.places_of(s) or most) // policy.num_parts(s),
                most if (host := policy.host_sets_of(s)) is None else host,
            )
            for s in range(draft.num_stages)
        ]
        self._own = [[s for s, rank in enumerate(draft.stage_ranks) if rank == own] for own in range(draft.num_ranks)]
        self.starts: dict[Op, float] = {}
        self._arrived = dict(facts.ready)  # when the tensor that an op reads is there
        self._links: dict[tuple[int, Direction], float] = {}  # when each is free
        self._moments: list[tuple[float, int, int, Op | None]] = []
        self._looks: set[tuple[int, float]] = set()
        self._numbers = itertools.count()

    def to_end(self) -> float:
        """Runs all ops. Returns when the last ends; infinity if they stop, for example at a W too far behind its I."""
        moments, now = self._moments, 0.0
        for rank in range(len(self.ranks)):
            for time in (0.0, *self._arrived.values()):
                self._push(time, rank, None)
        while moments:
            now, touched = moments[0][0], set()
            while moments and moments[0][0] <= now * _SAME_MOMENT:
                time, rank, _, op = heapq.heappop(moments)
                self._looks.discard((rank, time))
                touched.add(rank)
                if op is not None:
                    self._end(rank, op, now)
            for rank in sorted(touched):
                while self._compute(rank, now) or self._reload(rank, now) or self._offload(rank, now):
                    pass
        return now if all(rank.next == len(rank.lane) for rank in self.ranks) else math.inf

    def _push(self, time: float, rank: int, op: Op | None) -> None:
        if op is not None or (rank, time) not in self._looks:
            if op is None:
                self._looks.add((rank, time))
            heapq.heappush(self._moments, (time, rank, next(self._numbers), op))

    def _begin(self, rank: int, op: Op, now: float) -> bool:
        own, self.starts[op], end = self.ranks[rank], now, now + self._seconds[op.kind][op.stage]
        if op.kind.row.lane in COPY_LANES:
            own.copies[op.kind.row.lane] = end, op.stage
        else:
            own.is_busy = True
        if not frees_place(op):
            own.order.append(op)
        self._push(end, rank, op)
        return True

    def _end(self, rank: int, op: Op, now: float) -> None:
        own, stage = self.ranks[rank], self._stages[op.stage]
        if frees_place(op):
            own.order.append(op)
            stage.free += 1
        if op.kind is OFFLOAD:
            stage.where[op.microbatch or 0] = _Where.HOST
        elif op.kind in (RECOMPUTE, RELOAD):
            stage.where[op.microbatch or 0] = _Where.READY
            stage.host += op.kind is RELOAD
        if op.kind.row.lane in COPY_LANES:
            del own.copies[op.kind.row.lane]
            return
        own.is_busy = False
        reader, direction = self._facts.feeds.get(op), op.kind.row.direction
        if reader is None or direction is None or not writes_boundary(op):
            return
        to = self._stage_ranks[reader.stage]
        if to != rank:  # a link carries one tensor at a time
            hops = self._costs.hop_forward if direction is Direction.FORWARD else self._costs.hop_backward
            now = max(now, self._links.get((op.stage, direction), 0.0)) + hops[min(op.stage, reader.stage)]
            self._links[op.stage, direction] = now
        self._arrived[reader] = now
        self._push(now, to, None)

    # What a rank begins: each of these returns whether it did something --------------------------------------------------

    def _compute(self, rank: int, now: float) -> bool:
        """The next op of the compute lane [1]; if it cannot run, an R [4]."""
        own, facts = self.ranks[rank], self._facts
        if own.is_busy or own.next == len(own.lane):
            return False
        head = own.lane[own.next]
        arrived = self._arrived.get(head, math.inf if head in facts.fed else now)
        if arrived <= now * _SAME_MOMENT and self._may_run(rank, head, now):
            own.next += 1
            own.late = max(0.0, now - facts.due[head])
            return self._begin(rank, head, now)
        return self._recompute(rank, head, arrived, now)

    def _may_run(self, rank: int, head: Op, now: float) -> bool:
        set_ = head.stage, head.microbatch or 0
        reader, stage = self._facts.readers.get(set_), self._stages[head.stage]
        if reader == head:
            where = stage.where[set_[1]]
            if where is _Where.HELD and set_ not in self._facts.at_once:
                stage.held.remove(self._pair(set_))
            return where in (_Where.HELD, _Where.READY)
        if head.kind not in KEEPS_SET or reader is None:
            return True
        if self._takes_place(rank, head, now):
            stage.free, stage.where[set_[1]] = stage.free - 1, _Where.HELD
            if set_ not in self._facts.at_once:
                bisect.insort(stage.held, self._pair(set_))
        elif self._always:
            return False
        else:
            stage.lose(self._pair(set_), _Where.GONE)
        return True

    def _takes_place(self, rank: int, forward: Op, now: float) -> bool:
        """[1]"""
        stage = self._stages[forward.stage]
        if stage.free != 1 or not stage.missing or self._always:
            return stage.free > 0
        there = now + self._seconds[forward.kind][forward.stage]
        free, _ = self.ranks[rank].copies.get(Lane.OFFLOAD, (there, 0))
        gone = max(there, free) + self._seconds[OFFLOAD][forward.stage]
        return self._needed_at(rank, forward.stage, stage.missing[0]) >= gone

    def _recompute(self, rank: int, head: Op, arrived: float, now: float) -> bool:
        """[4]"""
        found = [
            (pair, s) for s in self._own[rank] if (pair := self._stages[s].next_of(self._stages[s].gone)) is not None
        ]
        if not found:
            return False
        pair, stage = min(found)
        is_next = self._facts.readers[stage, pair[1]] == head
        if self._mode is Mode.INLINE and not (is_next and arrived <= now * _SAME_MOMENT):
            return False
        self._stages[stage].bring(pair)
        return self._begin(rank, Op(stage, RECOMPUTE, pair[1]), now)

    def _reload(self, rank: int, now: float) -> bool:
        """[3]"""
        own, found = self.ranks[rank], []
        for s in self._own[rank] if Lane.RELOAD not in own.copies else ():
            stage = self._stages[s]
            if (pair := stage.next_of(stage.away)) is None:
                continue
            if self._always and stage.free == 1 and self._forwards_before(rank, s, pair):
                continue  # these F need the last slot
            if self._has_come(rank, self._needed_at(rank, s, pair) - self._rule.early * self._seconds[OFFLOAD][s], now):
                found.append((pair, s))
        if not found:
            return False
        pair, s = min(found)
        self._stages[s].bring(pair)
        return self._begin(rank, Op(s, RELOAD, pair[1]), now)

    def _offload(self, rank: int, now: float) -> bool:
        """[2]; a set that must free its slot, but cannot be offloaded now, is dropped."""
        own, found = self.ranks[rank], []
        for s in self._own[rank]:
            stage, missing = self._stages[s], self._stages[s].missing
            running = own.lane[own.next - 1] if own.is_busy else None
            last = next((pair for pair in reversed(stage.held) if running != Op(s, FORWARD, pair[1])), None)
            if last is None:
                continue
            unused = self._due(rank, s, last) - now
            is_full = stage.free == 0 and own.copies.get(Lane.OFFLOAD, (0.0, -1))[1] != s
            must = is_full and [] < missing < [last] and self._has_come(rank, self._needed_at(rank, s, missing[0]), now)
            wanted = (
                self._forwards_before(rank, s, last)
                + sum(bisect.bisect(sets, last) for sets in (stage.gone, stage.away))
                > stage.free
            )
            pays = self._always or (wanted and unused >= self._rule.margin * self._seconds[OFFLOAD][s] / _SAME_MOMENT)
            if pays and stage.host > 0 and Lane.OFFLOAD not in own.copies:
                found.append((unused, s, last))
            elif must and not self._always:
                stage.held.remove(last)
                stage.lose(last, _Where.GONE)
                stage.free += 1
                return True
        if not found:
            return False
        _, s, pair = max(found)
        stage = self._stages[s]
        stage.host -= 1
        stage.held.remove(pair)
        stage.lose(pair, _Where.GOING)
        return self._begin(rank, Op(s, OFFLOAD, pair[1]), now)

    def _has_come(self, rank: int, moment: float, now: float) -> bool:
        """Whether `moment` has come. If not, the rank checks again at `moment`."""
        if moment > now * _SAME_MOMENT:
            self._push(moment, rank, None)
        return moment <= now * _SAME_MOMENT

    def _pair(self, set_: tuple[int, int]) -> _Pair:
        return self._facts.number[self._facts.readers[set_]], set_[1]

    def _due(self, rank: int, stage: int, pair: _Pair) -> float:
        """When a set is expected to be read: when its B is due, plus the delay of the rank's last op."""
        return self._facts.due[self._facts.readers[stage, pair[1]]] + self.ranks[rank].late

    def _needed_at(self, rank: int, stage: int, pair: _Pair) -> float:
        """The latest start of the R or RELOAD of a missing set."""
        brings = RECOMPUTE if self._stages[stage].where[pair[1]] is _Where.GONE else RELOAD
        return self._due(rank, stage, pair) - self._seconds[brings][stage]

    def _forwards_before(self, rank: int, stage: int, pair: _Pair) -> int:
        """How many F of `stage` its rank has not run yet and runs before it reads the set of `pair`."""
        own = self._facts.forwards[stage]
        return bisect.bisect_left(own, pair[0]) - bisect.bisect_left(own, self.ranks[rank].next)


def _with_parts(order: Sequence[Op], policy: RecomputePolicy) -> Iterator[Op]:
    """`order`, with each copy, R and B of a whole set replaced by those of the parts.

    The parts of an offloaded set are copied one after the other. R of the last part replaces R. R of any other part comes just
    before the B of that part. The B of a kept set stays whole.
    """
    copied = {(op.stage, op.microbatch) for op in order if op.kind is OFFLOAD}
    again = {(op.stage, op.microbatch) for op in order if op.kind is RECOMPUTE}
    for op in order:
        parts, set_ = in_parts(op, policy.num_parts(op.stage)), (op.stage, op.microbatch)
        if op.kind is RECOMPUTE:
            yield parts[0]
        elif op.kind in ENDS_SET and set_ in again:
            yield parts[0]
            for part in parts[1:]:
                yield part._replace(kind=RECOMPUTE)
                yield part
        elif op.kind.row.lane in COPY_LANES or (op.kind in ENDS_SET and set_ in copied):
            yield from parts
        else:
            yield op


def _starts_if_kept(draft: Schedule, costs: Costs) -> dict[Op, float]:
    whole = add_waits(add_messages(keep_all(draft)), draft.transport_ahead)
    return {event.op: event.start for event in simulate(whole, costs).events}


def frees_place(op: Op) -> bool:
    """Whether `op` frees a slot at its end. `Schedule.order` has such an op where it ends, and any other op where it starts."""
    return op.kind is OFFLOAD or op.kind in ENDS_SET
