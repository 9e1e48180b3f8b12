"""The fastest plan for a memory budget: choices are priced once, whatever the budget, and a budget is a look-up among them.

    starts ──► priced by the list rule ──► neighbours of the best, while there is work left ──► five layers of the frontier
           ──► a search for better orders on the frontier ──► Plans ──► the few that fit best: made as a run makes them, checked, simulated

The (Pareto) frontier: choices that none beats in time and bytes. A budget takes the least time whose peak fits, so more budget is never
slower. Work is counted in stages x microbatches of the orders that are made, never in seconds: every machine finds the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipetrain.plan.balance import balance_evenly
from pipetrain.plan.footprint import Footprint, RankMemory
from pipetrain.plan.space import (
    Choice,
    PlanProblem,
    neighbours,
    plain_balances,
    promising_layouts,
    starts_of,
    to_host,
)
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.schedule.alive import peak_on_host
from pipetrain.schedule.bound import bound
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.families import ALWAYS_SPLIT, AUTO, generator_of
from pipetrain.schedule.halves import closed_up
from pipetrain.schedule.make import draft_of, held_to, lanes_of_ranks, make, with_copies
from pipetrain.schedule.policy import Mode, Offload, RecomputePolicy
from pipetrain.schedule.recompute import add_recompute, order_of
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Effort, ListRule, OrderProblem, list_by
from pipetrain.schedule.search.search import CachedOrder, best_schedule, read_order, write_order
from pipetrain.schedule.simulate import simulate

# Stages x microbatches of all orders that are made by the rule: some five seconds, or fifteen.
_WORK, _MOST_WORK = 400_000, 1_200_000
_ORDERS = 600  # that are made in any case, within the second limit
_OF_STARTS, _OF_FAMILIES = 0.3, 0.45  # of that, starts of `auto`, and of named families; the rest is for neighbours
_OF_ONE = 0.1  # at most for one named family
# A named family counts as so many orders of the rule: made, made with I and W, where it may keep sets, left out unmade.
_OF_MAKING, _OF_SPLITTING, _OF_KEEPING, _OF_LEAVING = 12, 30, 70, 3
# An order with copies counts as so many of the rule. All of them together may take this much work.
_OF_COPYING, _WORK_OF_COPIES = 60, 100_000
_PLACED = 2**13  # microbatches in the search for one of them
_COPYING = 2  # orders with copies that are made as a run makes them; a second or two each
_DEEP = 5  # layers of the frontier
_SEARCHED, _MOST_SEARCHED = 6, 512  # of the frontier, from the fastest to the smallest; stages x microbatches
_RULES, _STEPS, _MOST_POLISHED = 60, 1.0, 128  # of one search; CP-SAT needs minutes for more stages x microbatches
_SAME = 1 + 1e-9


class PricedPlan:
    """A choice, the seconds of its step by the list rule, and the bytes of its fullest rank. What a run makes of it is made when it is asked for."""

    def __init__(self, pricing: _Pricing, choice: Choice) -> None:
        """Raises:
        ValueError: a stage has fewer layers than segments.
        """
        self._problem, self._profile_key, self.choice = pricing.problem, pricing.profile_key, choice
        self.policy, self.costs, self.footprint = pricing.on_layers(choice)
        self.step_seconds, self.peak_bytes = math.inf, 0

    def price(self) -> None:
        """By the list rule; a named family, and one with copies, as it is made.

        Raises:
            ValueError: keys that do not fit each other, or copies that bring nothing.
        """
        if self.choice.schedule == AUTO and not self.policy.offloads:
            made, sums = None, self.costs.reduce
            self.step_seconds = list_by(*self._rule).seconds + (sums[0] if sums else 0.0)
        else:
            made = self._made()
            self.step_seconds = simulate(made, self.costs).step_seconds
        self.peak_bytes = max(rank.total for rank in self.memory(made))

    def memory(self, made: Schedule | None = None) -> tuple[RankMemory, ...]:
        """Of any order that the keys of the choice allow; of a named family as it was `made`."""
        choice, policy = self.choice, self.policy
        if choice.schedule != AUTO:
            return self.footprint.of_schedule(made or self.schedule)
        places = None if choice.mode is Mode.NEVER else [policy.places_of(s) or 1 for s in range(choice.num_stages)]
        return self.footprint.of_limits(choice.in_flight, places)

    @property
    def least_seconds(self) -> float:
        """Of any order of a named family; without the sums over the replicas."""
        spec = self.choice.spec(self._problem, self.policy)
        return bound(
            self.costs,
            spec.num_microbatches,
            policy=spec.policy,
            placement=spec.stage_ranks,
            split_backward=spec.split_backward or spec.family in ALWAYS_SPLIT,
        )

    @property
    def least_bytes(self) -> int:
        """Of the fullest rank in a named family, with R at the last moment."""
        choice, policy = self.choice, self.policy
        spec = choice.spec(self._problem, policy if choice.mode is Mode.NEVER else replace(policy, mode=Mode.INLINE))
        return max(rank.total for rank in self.footprint.of_schedule(add_recompute(lean_draft(spec))))

    @property
    def _spec(self) -> ScheduleSpec:
        spec = self.choice.spec(self._problem, self.policy)
        return replace(spec, costs=self.costs) if self.choice.schedule == AUTO else spec

    @property
    def _rule(self) -> tuple[OrderProblem, ListRule]:
        choice = self.choice
        problem = OrderProblem(self.costs, choice.num_microbatches, self.policy, split_backward=choice.split_backward)
        return problem, ListRule(choice.in_flight, choice.prefers)

    def _made(self) -> Schedule:
        spec = self._spec
        if self.policy.offloads:
            return self._with_copies(spec)
        if self.choice.schedule == AUTO:
            return held_to(spec, lanes_of_ranks(spec, list_by(*self._rule)))
        return make(spec)

    def _with_copies(self, spec: ScheduleSpec) -> Schedule:
        """Raises:
        ValueError: no set goes to host memory, or those of all microbatches in flight may take more of it than there is.
        """
        choice, allowed, word = self.choice, self._problem.host_bytes, f"recompute.offload={self.choice.offload}"
        if choice.schedule != AUTO:
            raise ValueError(f"{word}: plans with copies are for pipeline.schedule=auto, not {choice.schedule}")
        needed = max(int(size * limit) for size, limit in zip(self.costs.set_bytes, choice.in_flight))
        if allowed is not None and needed > allowed:
            raise ValueError(
                f"{word}: a rank may need {needed} bytes of host memory, and recompute.host_bytes allows {allowed}; "
                "use recompute.offload=none, or allow more"
            )
        schedule = with_copies(spec, self.costs, _PLACED)
        if not schedule.offloaded:
            raise ValueError(f"{word}: copies bring nothing here; use recompute.offload=none")
        return schedule

    @functools.cached_property
    def schedule(self) -> Schedule:
        """As a run makes it, checked."""
        made = self._made()
        check(made)
        return made

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return simulate(self.schedule, self.costs)

    def make(self) -> None:
        """Takes the schedule that a run makes, where it is faster."""
        self._take(make(self._spec))

    def _take(self, found: Schedule) -> None:
        if (timeline := simulate(found, self.costs)).step_seconds < self.step_seconds:
            check(found)
            self.schedule, self.timeline, self.step_seconds = found, timeline, timeline.step_seconds

    def search(self, seconds: float, cache: Path | None) -> None:
        """Searches for a better order, with limited work (0 s: none); the run then finds it in the cache."""
        spec, costs = self._spec, self.costs
        if cache is not None and read_order(cache, spec, costs) is None:
            write_order(cache, spec, costs, CachedOrder(order_of(self.schedule), 0.0, 0.0))
        if seconds == 0:
            return
        is_small = self.choice.num_stages * self.choice.num_microbatches <= _MOST_POLISHED
        effort = Effort(seconds, rules=_RULES, steps=_STEPS if is_small else 0.0)
        self._take(best_schedule(spec, costs, effort, cache).schedule)

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """The overrides for a run of the choice: keys that are not held, with new values."""
        choice, problem, profile_key = self.choice, self._problem, self._profile_key
        words = choice.words
        if choice.mode is Mode.NEVER:
            words |= {"recompute.sets": None, "recompute.segments": 1, "recompute.selective": ()}
        words["recompute.selective"] = words["recompute.selective"] or None
        texts = {key: typed(value) for key, value in words.items() if key not in problem.held}
        found = {key: text for key, text in texts.items() if problem.current.get(key) != text}
        uses_profile = profile_key is not None and (choice.schedule == AUTO or choice.segments != 1)
        return {**found, "plan.profile": str(profile_key)} if uses_profile else found

    @property
    def overrides(self) -> list[str]:
        """`keys` as they are typed."""
        return [f"{key}={value}" for key, value in self.keys.items()]

    @property
    def peak_activation_bytes(self) -> tuple[int, ...]:
        """Per rank, of the simulated step."""
        return self.footprint.of_step(self.schedule, self.timeline)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """The most bytes of each rank's offloaded sets in host memory at once, whatever the timing."""
        found, schedule = [0] * self.choice.num_ranks, self.schedule
        for stage in {stage for stage, _ in schedule.offloaded}:
            found[schedule.stage_ranks[stage]] += peak_on_host(schedule, stage)[0] * int(self.costs.set_bytes[stage])
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """A record of `plans` in `pipetrain plan --json`. `balance` and `stash` (microbatches in flight) have an entry per stage; `memory` and the
        lists of bytes one per rank of a replica."""
        return {
            **{key.partition(".")[2]: value for key, value in self.choice.words.items()},
            "selective": list(map(str, self.choice.selective)),
            "step_seconds": self.timeline.step_seconds,
            "memory": list(map(asdict, self.memory())),
            "peak_activation_bytes": self.peak_activation_bytes,
            "host_bytes": self.host_bytes,
            "peak_bytes": self.peak_bytes,
            "keys": self.overrides,
        }


@dataclass(frozen=True)
class Plans:
    """Everything that is worth a look, the fastest first."""

    plans: tuple[PricedPlan, ...]

    def within(self, budget: float) -> list[PricedPlan]:
        """Those whose every rank fits into so many bytes, the fastest first."""
        return [one for one in self.plans if one.peak_bytes <= budget]

    @property
    def smallest(self) -> PricedPlan:
        return min(self.plans, key=lambda one: (one.peak_bytes, one.step_seconds))


def make_plans(
    problem: PlanProblem,
    *,
    search_seconds: float = 0.0,
    cache: Path | None = None,
    profile_key: str | None = None,
) -> Plans:
    """All plans of a problem that are worth a look, under whatever budget.

    With `search_seconds` above 0 some of the frontier are searched for better orders; `cache` keeps these for the run. `profile_key`: the file
    that `plan.profile` has to name in a run.

    Raises:
        ValueError: the held keys allow no plan; the message is that of the first that was tried.
    """
    pricing = _Pricing(problem, profile_key)
    pricing.run()
    pricing.send_to_host()
    found = _deep_frontier(pricing.priced.values())
    copying = [one for one in found if one.choice.offload is not Offload.NONE]
    for one in copying[:: math.ceil(len(copying) / _COPYING) or 1]:
        one.make()
    if search_seconds > 0 or cache is not None:
        small = [one for one in found if one.choice.num_stages * one.choice.num_microbatches <= _MOST_SEARCHED]
        best = frontier(one for one in small if one.choice.schedule == AUTO)[::-1]
        for one in best[:: math.ceil(len(best) / _SEARCHED) or 1]:
            one.search(search_seconds, cache)
    found.sort(key=lambda one: (one.step_seconds, one.peak_bytes))
    unique: dict[Any, PricedPlan] = {}
    for one in found:
        unique.setdefault(tuple(one.keys.items()), one)
    return Plans(tuple(unique.values()))


def frontier(plans: Iterable[PricedPlan]) -> list[PricedPlan]:
    """The Pareto frontier, smallest first: none is faster in as few bytes."""
    found: list[PricedPlan] = []
    for one in sorted(plans, key=lambda one: (one.peak_bytes, one.step_seconds)):
        if not found or one.step_seconds * _SAME < found[-1].step_seconds:
            found.append(one)
    return found


def _deep_frontier(priced: Iterable[PricedPlan]) -> list[PricedPlan]:
    """The frontier, that of the rest, and so on: any budget has its five fastest among them."""
    left, found = list(priced), list[PricedPlan]()
    for _ in range(_DEEP):
        layer = frontier(left)
        found += layer
        left = [one for one in left if one not in layer]
    return found


class _Pricing:
    """Prices choices; `priced` has them in the order in which they were tried."""

    def __init__(self, problem: PlanProblem, profile_key: str | None) -> None:
        self.problem, self.profile_key = problem, profile_key
        self.priced: dict[Choice, PricedPlan] = {}
        self._left = 0.0
        self._profile_of = functools.cache(problem.profile.at)
        self._known: dict[Any, tuple[Costs, Footprint]] = {}
        self._refused: ValueError | None = None

    def on_layers(self, choice: Choice) -> tuple[RecomputePolicy, Costs, Footprint]:
        """The policy of a choice; and what stages cost, as a run has it with `plan.profile`, and hold, whatever is kept of how many microbatches."""
        problem, replicas, microbatches = self.problem, choice.num_replicas, choice.num_microbatches
        profile = self._profile_of(-(-problem.batch // (replicas * microbatches)))
        policy = choice.policy(problem, profile)
        key = replicas, microbatches, choice.balance, choice.mode, choice.segments, choice.selective
        if key not in self._known:
            selective = () if choice.mode is Mode.NEVER else policy.selective
            holdings = replace(problem.holdings, shards=replicas if problem.zero else 1)
            self._known[key] = (
                costs_of_layers(profile, choice.balance, selective, replicas),
                Footprint(profile, choice.balance, policy, microbatches, holdings),
            )
        return policy, *self._known[key]

    def run(self) -> None:
        layouts = promising_layouts(self.problem)
        largest = max((ranks * microbatches for _, ranks, microbatches in layouts), default=0)
        self._left = work = float(min(max(_WORK, _ORDERS * largest), _MOST_WORK))
        free, families = "pipeline.schedule" not in self.problem.held, list[Choice]()
        for number, layout in enumerate(layouts):
            starts = list(dict.fromkeys(starts_of(self.problem, layout)))
            families += [one for one in starts if free and one.schedule != AUTO]
            own = [one for one in starts if not free or one.schedule == AUTO]
            share = (self._left - (1 - _OF_STARTS) * work) / (len(layouts) - number)
            for choice in dict.fromkeys(_within(own, share)):
                self._price(choice)
        for choice in self._in_turn(families):
            if _work(choice) <= min(self._left - (1 - _OF_STARTS - _OF_FAMILIES) * work, _OF_ONE * work):
                self._price(choice)
        if not self.priced:
            balance_evenly(self.problem.profile.num_layers, self.problem.num_ranks // self.problem.num_replicas)
            held = " ".join(f"{key}={typed(value)}" for key, value in self.problem.held.items())
            raise self._refused or ValueError(f"{held}: no plan has these keys; leave out some of them")
        self._look_around()

    def send_to_host(self) -> None:
        """Prices choices of the frontier with copies to host memory, evenly spread, the fastest first."""
        front = frontier(one for one in self.priced.values() if one.choice.schedule == AUTO)[::-1]
        found = list(dict.fromkeys(more for one in front for more in to_host(self.problem, one.choice)))
        step = math.ceil(sum(map(_work, found)) / _WORK_OF_COPIES) or 1
        left = float(_WORK_OF_COPIES)
        for choice in found[::step]:
            if (left := left - _work(choice)) < 0:
                return
            self._price(choice)

    def _in_turn(self, families: Iterable[Choice]) -> list[Choice]:
        """The choices, one of each way to schedule and recompute in turn, least bound on the step first."""
        ways: dict[Any, list[tuple[float, Choice]]] = {}
        for one in families:
            way = one.schedule, one.num_stages // one.num_ranks, one.mode, one.segments, one.selective
            try:
                ways.setdefault(way, []).append((PricedPlan(self, one).least_seconds, one))
            except ValueError as error:
                self._refused = self._refused or error
        rows = (sorted(row, key=lambda pair: pair[0]) for row in ways.values())
        return [pair[1] for pairs in itertools.zip_longest(*rows) for pair in pairs if pair]

    def _look_around(self) -> None:
        """Prices the neighbours of the frontier, and those of what it becomes, the fastest first, while there is work left. So that no plan is
        worse than one with a plain balance, each of these has a frontier, too."""
        expanded: set[Choice] = set()
        numbers = {choice.num_stages for choice in self.priced}
        plain = {one for stages in numbers for one in plain_balances(self.problem, stages)}
        while self._left > 0:
            plans = self.priced.values()
            fronts = [plans, *([one for one in plans if one.choice.balance == balance] for balance in sorted(plain))]
            front = [one.choice for some in fronts for one in reversed(frontier(some))]
            fresh = [choice for choice in dict.fromkeys(front) if choice not in expanded]
            if not fresh:
                return
            for choice in fresh:
                expanded.add(choice)
                for other in neighbours(self.problem, choice):
                    if other not in self.priced and self._left > 0:
                        self._price(other)

    def _price(self, choice: Choice) -> None:
        may_leave = "pipeline.schedule" not in self.problem.held and choice.schedule != AUTO
        try:
            self._left -= 0 if may_leave else _work(choice)
            one = PricedPlan(self, choice)
            if may_leave and self._is_beaten(one):
                self._left -= choice.num_stages * choice.num_microbatches * _OF_LEAVING
                return
            self._left -= _work(choice) if may_leave else 0
            one.price()
        except ValueError as error:
            self._refused = self._refused or error
            return
        self.priced[choice] = one

    def _is_beaten(self, family: PricedPlan) -> bool:
        """Whether a choice is known that is as fast as any order of this family, in no more bytes than it takes."""
        least = family.least_seconds * _SAME
        rivals = [one.peak_bytes for one in self.priced.values() if one.step_seconds <= least]
        return bool(rivals) and min(rivals) <= family.least_bytes


def lean_draft(spec: ScheduleSpec) -> Schedule:
    """The order of F and B of a named family, in which each W is right behind its I: no order of them holds less."""
    draft = draft_of(spec, generator_of(str(spec.family))(spec.shape))
    return closed_up(draft) if spec.split_backward or spec.family in ALWAYS_SPLIT else draft


def _work(choice: Choice) -> float:
    """The work of a choice: stages x microbatches, more with parts, and more if a schedule is made for each pattern of kept sets."""
    parts = sum(choice.parts(stage) for stage in range(choice.num_stages)) / choice.num_stages
    ops = 1 if choice.mode is Mode.NEVER else (1 + 2 * parts) / 3
    if choice.schedule == AUTO:
        making = 1 if choice.offload is Offload.NONE else _OF_COPYING
    else:
        keeps = choice.mode is not Mode.NEVER and max(choice.slots or (2,)) > 1
        making = _OF_KEEPING if keeps else _OF_SPLITTING if choice.schedule in ALWAYS_SPLIT else _OF_MAKING
    return choice.num_stages * choice.num_microbatches * ops * making


def _within(starts: Sequence[Choice], share: float) -> Iterator[Choice]:
    """As many as the work `share` allows. First one of each mode, in any case; then whole stages in 1F1B order with
    more and more slots, to show what memory buys; then some of every way to schedule and recompute, evenly spread.
    """
    if sum(map(_work, starts)) <= share:
        yield from starts
        return
    plain = [
        one
        for one in starts
        if one.schedule == AUTO and one.segments == 1 and not (one.split_backward or one.selective)
    ]
    first = {one.mode: one for one in reversed(plain)}
    lean = [one for one in plain if (one.stash, one.balance) == (first[one.mode].stash, first[one.mode].balance)]
    for one in dict.fromkeys([*first.values(), *lean]):
        if share > 0 or one in first.values():
            share -= _work(one)
            yield one
    ways: dict[Any, list[Choice]] = {}
    for one in starts:
        ways.setdefault((one.schedule, one.mode, one.segments, one.selective, one.split_backward), []).append(one)
    for rows in ways.values():
        step = max(1, math.ceil(sum(map(_work, rows)) * len(ways) / max(share, 1)))
        if _work(rows[0]) <= share:
            yield from rows[::step]


def typed(value: Any) -> str:
    """A value of a key as it is typed."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
