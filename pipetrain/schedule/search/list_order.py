"""The order of `pipeline.schedule=auto` by a rule: list scheduling, event by event.

A free stage runs the first of these that it can (but `ListRule.first` lets some F run before [1]):

    [1] the next B that has its gradient and its set
    [2] the next R, in the order of B, that finds a slot, if its gradient is here, or no F may run, or the rule prefers it
    [3] an F whose input is here, if fewer microbatches are in flight than the limit. Its set is kept if the earlier ones in
        flight still find an activation slot
    [4] with a split backward, the next W; it goes before an R or an F that needs the slot that W frees

With 4 stages and 2 slots, F 1, B 2 and R 1 long (kept: 0 and 1 on rank 0, 0 and 1 on rank 1 ...):

    rank 0  F0 F1 F2 F3 F4 F5 .  .  .  B0 -- R2 B1 -- R3 B2 ...
    rank 1     F0 F1 F2 F3 .  .  B0 -- F4 R2 B1 -- ...

Graham (1966) calls this list scheduling. The rule runs with several limits and preferences between F and R; the best result counts.
"""

from __future__ import annotations

import enum
import heapq
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipetrain.schedule.bound import bound
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import FORWARD, PASS_SEQUENCES, RECOMPUTE, Direction, Kind
from pipetrain.schedule.messages import writes_boundary
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Keep, Mode, RecomputePolicy

_SLOPES = (1.0, 1.5, 2.0, 2.5, 3.0, math.inf)  # microbatches in flight per later stage: 1 is 1F1B, inf GPipe
_EXTRAS = (0, 1, 2)
_MOST_LISTED = 150_000  # stages x microbatches x rules
_FEWEST_RULES = 6
_SAME_MOMENT = 1 + 1e-12  # as in `simulate`


@dataclass(frozen=True)
class OrderProblem:
    """The problem that a search solves: an order with one stage per rank. Stages below `first_backward` have no backward."""

    costs: Costs
    num_microbatches: int
    policy: RecomputePolicy
    first_backward: int = 0
    split_backward: bool = False

    @property
    def num_stages(self) -> int:
        return self.costs.num_stages

    @property
    def way_back(self) -> tuple[Kind, ...]:
        """The ops of a microbatch's backward: B, or I and W."""
        return PASS_SEQUENCES[Direction.BACKWARD][-1 if self.split_backward else 0]

    def least_seconds(self) -> float:
        """A lower bound, in seconds, on the step of every order that `bound` covers, whatever sets it keeps."""
        policy = replace(self.policy, keep=Keep.AUTO)
        first, split = self.first_backward, self.split_backward
        return bound(self.costs, self.num_microbatches, policy=policy, first_backward=first, split_backward=split)

    def chooses(self, stage: int) -> bool:
        """Whether sets of `stage` need not all be kept. The last stage runs each B right after its F: it keeps them all."""
        is_open = self.policy.mode is not Mode.NEVER and self.places_of(stage) < self._most_places(stage)
        return is_open and self.first_backward <= stage < self.num_stages - 1

    def places_of(self, stage: int) -> int:
        """Activation slots of `stage`, each for a set or a part of one. If nothing bounds them, as many as all microbatches need."""
        most = self._most_places(stage)
        return min(self.policy.places_of(stage) or most, most)

    def _most_places(self, stage: int) -> int:
        return self.num_microbatches * self.policy.num_parts(stage)

    def stash_of(self, stage: int) -> int:
        """Microbatches that `stage` may hold between F and the end of their backward."""
        return min(self.policy.stash_of(stage) or self.num_microbatches, self.num_microbatches)


class Prefers(enum.Enum):
    """What a stage runs if it could run an F or an R. TURNS: the R if the last op was an F."""

    F = "F"
    TURNS = "turns"
    R = "R"


@dataclass(frozen=True)
class ListRule:
    """Parameters of the rule.

    `limits` are the microbatches that each stage may have in flight. With `next_only`, R of the next B may run before its
    gradient is here, but no other R may. `not_kept` are sets (stage, microbatch) that are not kept even if a slot is free.
    `first` are the F that run before a B that could run: this delays the B, but gives the later stages work.
    """

    limits: tuple[int, ...]
    prefers: Prefers = Prefers.F
    next_only: bool = False
    not_kept: frozenset[tuple[int, int]] = frozenset()
    first: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Effort:
    """How long to search: seconds; or, for the same result on any machine, `rules` tried by `climb` and `steps` of
    CP-SAT deterministic time (0: none)."""

    seconds: float
    rules: int | None = None
    steps: float | None = None

    def share(self, part: float) -> Effort:
        """A part of the seconds and the steps; as many rules."""
        return replace(self, seconds=self.seconds * part, steps=self.steps and self.steps * part)


@dataclass(frozen=True)
class ListedOrder:
    """The ops of each stage one after the other, R included, and the time at which the last of them ends."""

    lanes: tuple[tuple[Op, ...], ...]
    seconds: float


def list_order(problem: OrderProblem) -> ListedOrder:
    """The order of the rule, with the limits and the preference that give the shortest step."""
    return min((list_by(problem, rule) for rule in rules_of(problem)), key=lambda order: order.seconds)


def rules_of(problem: OrderProblem) -> Iterator[ListRule]:
    """The rules to try: limits that grow with the distance from the last stage, with each preference that makes a difference.

    All of them (some hundred) if that takes a second or two; for larger problems, evenly spread ones.
    """
    rules = list(_all_rules(problem))
    most = max(_FEWEST_RULES, _MOST_LISTED // (problem.num_stages * problem.num_microbatches))
    yield from rules[:: -(-len(rules) // most)]


def _all_rules(problem: OrderProblem) -> Iterator[ListRule]:
    stages, microbatches = problem.num_stages, problem.num_microbatches

    def limit(stage: int, slope: float, extra: int) -> int:
        behind = stages - 1 - stage
        wanted = microbatches if behind and math.isinf(slope) else math.ceil(1 + (behind and behind * slope)) + extra
        return min(problem.stash_of(stage), microbatches, max(behind + 1, wanted))

    shapes = ((slope, extra) for slope in _SLOPES for extra in _EXTRAS)
    for limits in dict.fromkeys(tuple(limit(s, *shape) for s in range(stages)) for shape in shapes):
        if problem.policy.mode in (Mode.EARLY, Mode.OVERLAP):
            has_choice = max(map(problem.places_of, range(stages))) > 1
            reaches = (False, True) if has_choice else (False,)
            yield from (ListRule(limits, prefers, next_only) for prefers in Prefers for next_only in reaches)
        else:  # R has no choice
            yield ListRule(limits)


def list_by(problem: OrderProblem, rule: ListRule) -> ListedOrder:
    """The order that one rule makes."""
    return _Listing(problem, rule).order()


class _Stage:
    """The state of one stage: what it has done, holds and has received. It runs microbatches in order, so counts are enough."""

    def __init__(self, problem: OrderProblem, stage: int, rule: ListRule) -> None:
        turn, *rest = problem.way_back
        costs, microbatches = problem.costs, problem.num_microbatches
        self._stage = stage
        self._microbatches = microbatches
        self._limit, self._places, self._stash = rule.limits[stage], problem.places_of(stage), problem.stash_of(stage)
        self._prefers, self._next_only = rule.prefers, rule.next_only
        self._not_kept = {i for own, i in rule.not_kept if own == stage}
        self._first = {i for own, i in rule.first if own == stage}
        self._with_gradient_only = problem.policy.mode is Mode.INLINE
        self._kinds = (FORWARD, RECOMPUTE, turn, *rest)
        self._seconds = [costs.of(kind)[stage] for kind in self._kinds]
        self._parts, self._share_of = problem.policy.num_parts(stage), problem.policy.share_of
        self.has_backward = stage >= problem.first_backward
        self.free_at = 0.0
        self.inputs = [math.inf] * microbatches  # when each arrives
        self.gradients = [math.inf] * microbatches
        self.forwards = self.turns = self.ends = 0  # F, B or I, B or W done so far
        self._without_set = 0  # the first microbatch whose set is not complete; those before it have or had theirs
        self._has_set = [False] * microbatches
        self._brought = [0] * microbatches  # parts of its set that R has brought
        self._read = [0] * microbatches  # ... and that B has read
        self._later: set[int] = set()  # the kept ones after the first without a set
        self._alive = 0  # slots that are taken
        self.lane: list[Op] = []

    def take(self, now: float) -> int | None:
        """Starts the op that the rule says; returns 0 (F), 1 (R), 2 (B or I), 3 (W), or None for none."""
        what = self._choose(now * _SAME_MOMENT)
        if what is not None:
            op = self._begin(what)
            self.lane.append(op)
            self.free_at = now + self._seconds[what] * self._share_of(self._stage, op.part)
        return what

    def _choose(self, now: float) -> int | None:
        turn, missing = self.turns, self._without_set
        waits_w = self.ends < turn
        if self.forwards in self._first and self._may_run_forward(now):
            return 0
        if turn < self.forwards and self.has_backward:
            has_next = self._has_set[turn] or self._brought[turn] > self._read[turn]
            if has_next and self.gradients[turn] <= now:
                return 2  # [1]
            if missing < self.forwards and (waits_w or self._alive < self._places) and self._runs_r(missing, now):
                return 1 if self._alive < self._places else 3  # [2] [4]
        if self._may_run_forward(now):
            return 3 if waits_w and not self._can_keep(self.forwards) else 0  # [4] [3]
        return 3 if waits_w else None  # [4]

    def _runs_r(self, missing: int, now: float) -> bool:
        if self.gradients[missing] <= now:
            return True
        if self._with_gradient_only or (self._next_only and missing != self.turns):
            return False
        prefers = self._prefers
        if prefers is Prefers.R or not self._may_run_forward(now):
            return True
        return prefers is Prefers.TURNS and self.lane[-1].kind is FORWARD

    def _may_run_forward(self, now: float) -> bool:
        number = self.forwards
        if number >= self._microbatches or self.inputs[number] > now:
            return False
        return not self.has_backward or (number - self.turns < self._limit and number - self.ends < self._stash)

    def _begin(self, what: int) -> Op:
        if what == 0:
            number, self.forwards = self.forwards, self.forwards + 1
            if self.has_backward and self._can_keep(number):
                self._alive += self._parts
                self._later.add(number)
                self._set_is_there(number)
            return Op(self._stage, self._kinds[what], number)
        if what == 1:
            return self._next_part(what, self._without_set, self._brought)
        if what == 2:
            return self._begin_turn()
        self.ends, self._alive = self.ends + 1, self._alive - 1
        return Op(self._stage, self._kinds[what], self.ends - 1)

    def _begin_turn(self) -> Op:
        number, is_end = self.turns, self._kinds[2] is self._kinds[-1]
        if not self._brought[number] or self._parts == 1:
            self.turns += 1
            self.ends += is_end
            self._alive -= is_end * self._parts
            return Op(self._stage, self._kinds[2], number)
        op = self._next_part(2, number, self._read)
        self.turns += not op.part
        self.ends += not op.part
        return op

    def _next_part(self, what: int, number: int, counts: list[int]) -> Op:
        """R or B of the next part of a set, from the last to the first; of all of it, where the stage has no parts."""
        counts[number] += 1
        self._alive += 1 if counts is self._brought else -1
        if counts is self._brought and counts[number] == self._parts:
            self._set_is_there(number)
        part = None if self._parts == 1 else self._parts - counts[number]
        return Op(self._stage, self._kinds[what], number, part)

    def _can_keep(self, number: int) -> bool:
        """Whether this set may take slots. If an earlier microbatch in flight has no set yet, one slot must stay free for it."""
        if number in self._not_kept or self._alive + self._parts > self._places:
            return False
        return self._without_set == number or (len(self._later) + 1) * self._parts < self._places

    def _set_is_there(self, number: int) -> None:
        self._has_set[number] = True
        while self._without_set < self._microbatches and self._has_set[self._without_set]:
            self._later.discard(self._without_set)
            self._without_set += 1


class _Listing:
    """One run of the rule over all stages: a heap of moments at which a stage may be able to start an op."""

    def __init__(self, problem: OrderProblem, rule: ListRule) -> None:
        self._problem = problem
        self._stages = [_Stage(problem, stage, rule) for stage in range(problem.num_stages)]
        self._moments: list[tuple[float, int]] = [(0.0, stage) for stage in range(problem.num_stages)]
        self._stages[0].inputs = [0.0] * problem.num_microbatches

    def order(self) -> ListedOrder:
        moments, stages, end = self._moments, self._stages, 0.0
        while moments:
            now, stage = heapq.heappop(moments)
            own = stages[stage]
            if now < own.free_at:
                continue  # its end has a moment of its own
            what = own.take(now)
            if what is not None:
                end = max(end, own.free_at)
                heapq.heappush(moments, (own.free_at, stage))
                self._send(stage, what, own.free_at)
        return ListedOrder(tuple(tuple(stage.lane) for stage in stages), end)

    def _send(self, stage: int, what: int, ended: float) -> None:
        """Sends the output of the F or backward that `ended` to the next stage in its direction."""
        stages, costs = self._stages, self._problem.costs
        own = stages[stage]
        if not writes_boundary(own.lane[-1]):
            return
        if what == 0 and stage + 1 < len(stages):
            self._arrive(stage + 1, stages[stage + 1].inputs, own.forwards - 1, ended, costs.hop_forward[stage])
        elif what == 0 and own.has_backward:
            own.gradients[own.forwards - 1] = ended
        elif what == 2 and stage > 0 and stages[stage - 1].has_backward:
            self._arrive(stage - 1, stages[stage - 1].gradients, own.turns - 1, ended, costs.hop_backward[stage - 1])

    def _arrive(self, stage: int, arrivals: list[float], number: int, sent: float, hop: float) -> None:
        before = arrivals[number - 1] if number else 0.0  # a link carries one tensor at a time
        arrivals[number] = max(sent, before) + hop
        heapq.heappush(self._moments, (arrivals[number], stage))


# Better orders by small changes of the rule: the only search without ortools, and the start of the one with it -------------------------
#
# A move changes the limit of a stage, what it prefers, which sets it may keep, or which F go before a B. It counts if the order is no
# slower (Hansen and Mladenovic 1997 call it a reduced variable neighbourhood search: one to three changes at a time, at random).
# If stages are recomputed in parts, many rules give steps of equal length, and only longer steps lead to a shorter one. There the search
# also accepts a slower rule, less and less often (Kirkpatrick, Gelatt and Vecchi 1983, simulated annealing).

_MOST_CHANGES = 3
_SEED = 0
_WARMTH = 0.005  # of a step, at the start: a rule that is so much slower is accepted with a chance of 1/e
_COLD = 0.03  # of that, at the end


def climb(problem: OrderProblem, effort: Effort, least_seconds: float) -> ListedOrder:
    """The best order of all rules that were tried. The search ends early if its step is `least_seconds`."""
    warmth = _WARMTH if problem.policy.in_parts else 0.0
    best, rule = min(((list_by(problem, rule), rule) for rule in rules_of(problem)), key=lambda pair: pair[0].seconds)
    chance = random.Random(_SEED)
    start, tried, here = time.monotonic(), 0, best
    enough = least_seconds * (1 + 1e-9)
    while best.seconds > enough:
        spent, all_of_it = (time.monotonic() - start, effort.seconds) if effort.rules is None else (tried, effort.rules)
        if spent >= all_of_it:
            break
        changed = rule
        for _ in range(chance.randint(1, _MOST_CHANGES)):
            changed = _changed(problem, changed, chance)
        order, tried = list_by(problem, changed), tried + 1
        slower = order.seconds - here.seconds
        warm = warmth * here.seconds * (_COLD + 1 - spent / all_of_it)
        if slower <= 0 or (warm > 0 and chance.random() < math.exp(-slower / warm)):
            here, rule = order, changed
            best = here if here.seconds <= best.seconds else best
    return best


def _changed(problem: OrderProblem, rule: ListRule, chance: random.Random) -> ListRule:
    what = chance.random()
    stage = chance.randrange(problem.num_stages)
    if what < 0.1:
        return replace(rule, prefers=chance.choice(list(Prefers)), next_only=chance.random() < 0.5)
    if what < 0.3 or not problem.chooses(stage):
        most = min(problem.num_microbatches, problem.stash_of(stage))
        limits = list(rule.limits)
        limits[stage] = min(most, max(1, limits[stage] + chance.choice((-2, -1, 1, 2))))
        return replace(rule, limits=tuple(limits))
    number = chance.randrange(problem.num_microbatches)
    if what < 0.6:
        return replace(rule, not_kept=rule.not_kept ^ {(stage, number)})
    some = range(number, min(problem.num_microbatches, number + chance.choice((1, 1, 2, 4))))
    return replace(rule, first=rule.first ^ {(stage, i) for i in some})
