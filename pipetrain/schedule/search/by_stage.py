"""Finds orders with copies to host memory for a step of a given length: stage by stage, the last one first.

    stage 3    F0 B0 F1 B1 F2 B2 ...        at the pace of the slowest stage
    stage 2    each F ends before that microbatch's F on stage 3 begins, each B begins after its B there has ended; F late, B early
    stage 1    the same with stage 2 ...    until stage 0 has its order, or some stage has none

A stage sets the one before it a deadline for each F and an arrival for each gradient. Late F and early B leave it the most
time. If a stage gets no order, other starts of the last stage are tried, or a longer step. One stage is a small problem:

    by_rule      the rule of `offload.py` places the sets. F come in the order of deadlines, B in that of arrivals. Each F comes so
                 early that R has time. Of the tries that keep all deadlines, the one with the least time in flight counts
    by_solver    constraint programming (CP-SAT of ortools) starts from that order. Variables: the starts of all ops and, for
                 each set, whether it is recomputed or offloaded. A model of all stages together finds nothing in minutes

Times are whole numbers, as in `polish.py`. Callers compare the orders by their simulated steps.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipetrain.schedule.families import AUTO
from pipetrain.schedule.kinds import OFFLOAD, PASS_SEQUENCES, RECOMPUTE, RELOAD, Direction, Kind
from pipetrain.schedule.offload import CopyRule, Placing, frees_place
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Mode, Offload
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.search.list_order import Effort, ListedOrder, OrderProblem
from pipetrain.schedule.search.polish import in_units, solved, unit_of

(_FORWARD,) = PASS_SEQUENCES[Direction.FORWARD][0]
# Shares of the effort, one per attempt at a step: many short ones find more than a few long ones.
_SHARES = (0.01, 0.01, 0.02, 0.02, 0.04, 0.04, 0.08, 0.08, 0.16, 1.0)
_FINEST = 1 / 500  # of a step: the search ends when it could not shorten a step by more
_AHEAD = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    6.0,
    8.0,
    10.0,
    12.0,
    1e6,
)  # durations of R from F's end to its deadline
_TRIES = list(itertools.product(_AHEAD, map(CopyRule, (2.0, 2.0, 2.5, 3.0, 3.0, 2.5), (0.0, 0.5, 0.25, 0.0, 0.5, 1.0))))
random.Random(0).shuffle(_TRIES)  # so that the first few differ in all three parameters
MOST_PLACED = 2**16  # microbatches that `by_rule` places: a second or two
_ATTEMPTS = 8  # attempts that `by_rule` makes at most
_MOST_HINTED = 2**13  # microbatches that the rule places for one stage before the solver begins
_ROUNDING = 1e-6
_COARSE = 4  # coarse units in the shortest F
_VARIANTS = 3  # of the last stage

Bounds = tuple[list[int], list[int]]  # when each F must have ended, and when each gradient is there
Starts = Mapping[Op, float]  # of the ops of a stage
Lanes = tuple[tuple[Op, ...], ...]  # of each stage the ops in the order in which they take and free slots
_NO_BOUNDS: Bounds = [], []


def by_rule(problem: OrderProblem, seconds: float, most_placed: int = MOST_PLACED) -> Iterator[ListedOrder]:
    """Orders whose steps are shorter than `seconds`, each shorter than the one before; the same orders on any machine. The rule
    places about `most_placed` microbatches in all."""
    unit = unit_of(problem.costs, seconds)
    whole, attempts = replace(problem, costs=in_units(problem.costs, unit)), itertools.count()
    most = max(1, most_placed // (_ATTEMPTS * _VARIANTS * problem.num_stages * problem.num_microbatches))

    def attempt(step: int) -> Lanes | None:
        tries = (
            _in_turn(whole, step, variant, lambda window, bounds: _place(window, bounds, most))
            for variant in range(_VARIANTS)
        )
        return next((lanes for lanes in tries if lanes is not None), None)

    yield from _shorter(problem, seconds, unit, attempt, lambda: next(attempts) >= _ATTEMPTS)


def by_solver(
    problem: OrderProblem, seconds: float, effort: Effort, step_of: Callable[[ListedOrder], float]
) -> Iterator[ListedOrder]:
    """As `by_rule`, by constraint programming. The orders are the same on any machine if the effort is in steps.

    In the first half of the effort, the unit of time is a quarter of the shortest F, so short hops take 0. With finer units the
    solver finds less. `step_of` simulates an order on the real times.
    """
    fine, coarse = unit_of(problem.costs, seconds), min(filter(None, problem.costs.forward), default=0.0) / _COARSE
    units = (coarse, fine) if fine * _COARSE < coarse else (fine,)
    part = replace(effort, seconds=effort.seconds / len(units), steps=effort.steps and effort.steps / len(units))
    real = seconds
    for unit in units:
        costs = in_units(problem.costs, unit, nearest=unit > fine)
        solver, best = _Solver(replace(problem, costs=costs), part), real
        for share in _SHARES:
            attempt = functools.partial(solver.order, share=share)
            for order in _shorter(problem, best, unit, attempt, lambda: solver.is_over):  # noqa: B023
                best, real = order.seconds, min(real, step_of(order))
                yield order


def _shorter(
    problem: OrderProblem,
    seconds: float,
    unit: float,
    attempt: Callable[[int], Lanes | None],
    is_over: Callable[[], bool],
) -> Iterator[ListedOrder]:
    """Bisects the step: first tries the lower bound, then halfway between the last step that failed and the best so far."""
    least, best = math.ceil(problem.least_seconds() / unit - 1e-6), math.ceil(seconds / unit - 1e-6)
    hopeless = least - 1
    while best - hopeless > max(1, best * _FINEST) and not is_over():
        step = least if hopeless < least else (best + hopeless) // 2
        lanes = attempt(step)
        if lanes is None:
            hopeless = step
        else:
            best = step
            yield ListedOrder(lanes, step * unit)


def _in_turn(
    problem: OrderProblem, step: int, variant: int, solve: Callable[[_Window, Bounds], Starts | None]
) -> Lanes | None:
    """The ops of each stage, within the bounds that the next stage sets. None: `solve` finds no order for a stage."""
    lanes, bounds = [], _NO_BOUNDS
    for stage in reversed(range(problem.num_stages)):
        window = _Window(problem, stage, step)
        if stage == problem.num_stages - 1:
            starts: Starts | None = _last_stage(window, variant)
        else:
            starts = solve(window, bounds) if window.may_fit(bounds) else None
        if starts is None:
            return None
        lanes.append(window.in_order(starts))
        bounds = window.bounds(starts) if stage else _NO_BOUNDS
    return tuple(reversed(lanes))


class _Window:
    """A stage of a problem in a step that takes `step`: its costs in whole units, and the time in which its ops may run."""

    def __init__(self, problem: OrderProblem, stage: int, step: int) -> None:
        costs, first = problem.costs, problem.first_backward
        self.problem, self.stage, self.step = problem, stage, step
        self.microbatches = range(problem.num_microbatches)
        self.kinds = (_FORWARD, *problem.way_back) if stage >= first else (_FORWARD,)
        self.seconds = {kind: round(costs.of(kind)[stage]) for kind in (*self.kinds, RECOMPUTE, OFFLOAD)}
        self.turn = problem.way_back[0]
        turns, before = costs.of(self.turn), range(stage)
        # The first F comes after the F and hops of earlier stages. The others follow at most as fast as the slowest of these.
        self.head = round(sum(costs.forward[:stage]) + sum(costs.hop_forward[:stage]))
        self.pace = round(max((*costs.forward[:stage], *costs.hop_forward[:stage]), default=0))
        late = sum(costs.of(kind)[first] for kind in problem.way_back[1:])
        self.tail = round(sum(turns[first:stage]) + sum(costs.hop_backward[first:stage]) + late)
        self.pace_back = round(max((*(turns[s] for s in before[first:]), *costs.hop_backward[first:stage]), default=0))

    def earliest(self, number: int) -> int:
        """The least start of F."""
        return self.head + number * max(self.pace, self.seconds[_FORWARD])

    def latest(self, number: int) -> int:
        """The largest end of B or I."""
        return self.step - self.tail - (self.microbatches[-1] - number) * max(self.pace_back, self.seconds[self.turn])

    def ops(self, kind: Kind) -> list[Op]:
        """The ops of a kind, one per microbatch; none if there is no backward."""
        return [Op(self.stage, kind, i) for i in self.microbatches if kind in self.kinds]

    def span(self, op: Op, bounds: Bounds) -> tuple[int, int]:
        """The least start and the largest end of an op."""
        number = op.microbatch or 0
        if op.kind is _FORWARD:
            return self.earliest(number), bounds[0][number]
        return bounds[1][number], self.latest(number) if op.kind is self.turn else self.step

    def may_fit(self, bounds: Bounds) -> bool:
        """Whether each op, without the others, has time between its bounds."""
        spans = ((self.span(op, bounds), kind) for kind in self.kinds for op in self.ops(kind))
        return all(least + self.seconds[kind] <= most for (least, most), kind in spans)

    def keeps(self, bounds: Bounds, starts: Starts) -> bool:
        """Whether every op has a start and ends in time."""
        ops = [op for kind in self.kinds for op in self.ops(kind)]
        return all(op in starts and self.ended(op, starts[op]) <= self.span(op, bounds)[1] + _ROUNDING for op in ops)

    def ended(self, op: Op, start: Any) -> Any:
        return start + self.seconds[OFFLOAD if op.kind is RELOAD else op.kind]

    def in_order(self, starts: Starts) -> tuple[Op, ...]:
        """The ops in the order in which they take and free slots. At the same moment, those that free a slot come first."""
        moments = {op: self.ended(op, start) if frees_place(op) else start for op, start in starts.items()}
        return tuple(sorted(starts, key=lambda op: (moments[op], not frees_place(op), op.microbatch)))

    def life(self, starts: Mapping[Op, Any]) -> Any:
        """The time in flight of all microbatches together, less a constant."""
        return sum(starts[op] for op in self.ops(self.turn)) - sum(starts[op] for op in self.ops(_FORWARD))

    def bounds(self, starts: Starts) -> Bounds:
        """Deadlines of F and arrivals of gradients for the stage before. A link carries one tensor at a time."""
        costs = self.problem.costs
        hop, back = round(costs.hop_forward[self.stage - 1]), round(costs.hop_backward[self.stage - 1])
        deadlines, gradients = [self.step], [0]
        for op in reversed(self.ops(_FORWARD)):
            deadlines.append(min(math.floor(starts[op] + _ROUNDING), deadlines[-1]) - hop)
        for op in self.ops(self.turn):
            gradients.append(max(math.ceil(self.ended(op, starts[op]) - _ROUNDING), gradients[-1]) + back)
        return deadlines[:0:-1], gradients[1:] or [0] * len(self.microbatches)


def _last_stage(window: _Window, variant: int) -> Starts:
    """Starts with each backward right after its F. Variants: at the pace of the slowest stage, early or late; evenly spread."""
    problem, costs, last = window.problem, window.problem.costs, window.microbatches[-1]
    work = [sum(costs.of(kind)[s] for kind in (_FORWARD, *problem.way_back)) for s in range(problem.num_stages)]
    own = sum(window.seconds[kind] for kind in window.kinds)
    room = max(0, window.step - window.head - window.tail - own)
    spread = room / max(1, last)
    pace = min(spread, max((*work, *costs.hop_forward, *costs.hop_backward))) if variant < 2 else spread
    begin = window.head + (variant == 1) * (room - pace * last)
    starts: dict[Op, float] = {}
    for i in window.microbatches:
        start: float = math.floor(begin + pace * i + _ROUNDING)
        for kind in window.kinds:
            op = Op(window.stage, kind, i)
            starts[op], start = start, window.ended(op, start)
    return starts


# One stage by the rule --------------------------------------------------------------------------------------------------


def _place(window: _Window, bounds: Bounds, most: int) -> Starts | None:
    """The starts of a stage by the rule: of `most` tries, that with the least time in flight. None: all miss a deadline."""
    best: Starts | None = None
    for ahead, rule in _TRIES[:most]:
        starts = dict(_placing(window, bounds, ahead).place(rule).starts)
        _put_off(window, bounds, starts)
        if window.keeps(bounds, starts) and (best is None or window.life(starts) < window.life(best)):
            best = starts
    return best


def _placing(window: _Window, bounds: Bounds, ahead: float) -> Placing:
    """The stage alone: F in the order of deadlines, `ahead` durations of R before them; backwards in the order of gradients."""
    problem, stage = window.problem, window.stage
    ready: dict[Op, float] = {}
    for i, deadline, gradient in zip(window.microbatches, *bounds):
        begin = max(window.earliest(i), deadline - window.seconds[_FORWARD] - ahead * window.seconds[RECOMPUTE])
        full = i - problem.stash_of(stage)  # the microbatch that must have ended before, by `stash`
        ready[Op(stage, _FORWARD, i)] = max(begin, bounds[1][full] + _ROUNDING) if full >= 0 else begin
        ready |= {Op(stage, kind, i): gradient for kind in window.kinds[1:]}
    lane = sorted(ready, key=lambda op: (ready[op], op.kind is not _FORWARD, op.microbatch))
    draft = Schedule(
        family=AUTO,
        num_microbatches=problem.num_microbatches,
        stage_ranks=(0,) * problem.num_stages,
        policy=problem.policy,
        lanes=({Lane.COMPUTE: tuple(lane)},),
        waits={},
        kept=frozenset(),
        first_backward=problem.first_backward,
    )
    return Placing(draft, problem.costs, ready)


def _put_off(window: _Window, bounds: Bounds, starts: dict[Op, float]) -> None:
    """Moves each F as late as its deadline, the next op of the stage, and the OFFLOAD or R of its set allow."""
    following = math.inf
    for op in sorted((op for op in starts if op.kind.computes), key=starts.__getitem__, reverse=True):
        if op.kind is _FORWARD:
            number = op.microbatch or 0
            own = (starts.get(Op(op.stage, kind, number), math.inf) for kind in (OFFLOAD, RECOMPUTE))
            latest = min(bounds[0][number], following, *own) - window.seconds[_FORWARD]
            starts[op] = max(starts[op], latest)
        following = starts[op]


# One stage by constraint programming ------------------------------------------------------------------------------------


class _Solver:
    """Solves stages until the effort is spent."""

    def __init__(self, problem: OrderProblem, effort: Effort) -> None:
        self._cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
        self._problem, self._effort = problem, effort
        self._all = effort.seconds if effort.steps is None else effort.steps
        self._spent, self._end = 0.0, 0.0
        self._attempts = itertools.count()
        self._hints: dict[Any, Starts | None] = {}  # the starts by the rule, by stage, step and bounds
        self._best: dict[Any, Starts | None] = {}  # the best starts, once proven; None: there are none

    @property
    def is_over(self) -> bool:
        return self._spent >= self._all

    def order(self, step: int, share: float) -> Lanes | None:
        """The ops of each stage for a step that takes `step`, found with this share of the effort; None: not found."""
        self._end = min(self._all, self._spent + share * self._all)
        return _in_turn(self._problem, step, next(self._attempts) % _VARIANTS, self._solve)

    def _solve(self, window: _Window, bounds: Bounds) -> Starts | None:
        key, start = (window.stage, window.step, str(bounds)), time.monotonic()
        if key in self._best:
            return self._best[key]
        if key not in self._hints:
            self._hints[key] = _place(window, bounds, max(1, _MOST_HINTED // len(window.microbatches)))
        hint = self._hints[key]
        model, solver = _Model(self._cp_model, window, bounds, hint), self._cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.interleave_search = True
        solver.parameters.random_seed = next(self._attempts)
        effort, in_steps = (self._end - self._spent) / 2, self._effort.steps is not None
        if in_steps:
            solver.parameters.max_deterministic_time = max(effort, 0.01)
        else:
            solver.parameters.max_time_in_seconds = max(effort, 0.05)
        status = solved(solver, model.model)
        self._spent += solver.ResponseProto().deterministic_time if in_steps else time.monotonic() - start
        found = model.starts(solver) if status in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE) else hint
        if status in (self._cp_model.OPTIMAL, self._cp_model.INFEASIBLE):
            self._best[key] = found
        return found


class _Model:
    """The model of one stage before the last. `hint`: the starts by the rule. `_choices` has two variables for each microbatch:
    whether its set is recomputed, and whether it is offloaded."""

    def __init__(self, cp_model: Any, window: _Window, bounds: Bounds, hint: Starts | None) -> None:
        self.model = cp_model.CpModel()
        self._window, self._bounds = window, bounds
        self._start: dict[Op, Any] = {}
        self._choices: list[tuple[Any, Any]] = []
        busy = [self._interval(op, *window.span(op, bounds)) for kind in window.kinds for op in window.ops(kind)]
        for kind in window.kinds:
            self._follow(window.ops(kind))
        for ways in zip(*map(window.ops, window.kinds)):
            self._follow(ways)
        if window.turn in window.kinds:
            busy += self._add_sets()
        self.model.AddNoOverlap(busy)
        self.model.Minimize(window.life(self._start))
        for op, start in (hint or {}).items():
            self.model.AddHint(self._start[op], math.floor(start))
        for i, choice in enumerate(self._choices if hint else ()):
            for chosen, kind in zip(choice, (RECOMPUTE, OFFLOAD)):
                self.model.AddHint(chosen, int(Op(window.stage, kind, i) in (hint or {})))

    def _interval(self, op: Op, least: int, most: int, *chosen: Any) -> Any:
        """The interval of an op. If the variables `chosen` are true, the op runs, and all of it between `least` and `most`."""
        seconds = self._window.ended(op, 0)
        start = self._start[op] = self.model.NewIntVar(least, max(least, most - seconds), str(op))
        make = self.model.NewOptionalIntervalVar if chosen else self.model.NewIntervalVar
        return make(start, seconds, start + seconds, *chosen, str(op))

    def _ended(self, op: Op) -> Any:
        return self._window.ended(op, self._start[op])

    def _follow(self, ops: Iterable[Op], *chosen: Any) -> None:
        for first, second in itertools.pairwise(ops):
            self.model.Add(self._start[second] >= self._ended(first)).OnlyEnforceIf(*chosen)

    def _add_sets(self) -> list[Any]:
        """Adds the choice for each set, and the slots that the set takes. Returns the intervals of R."""
        window, model, stage, problem = self._window, self.model, self._window.stage, self._window.problem
        busy, down, up, lives, on_host = [], [], [], [], []
        must, may = problem.policy.offload is Offload.ALWAYS, problem.chooses(stage)
        for i in window.microbatches:
            again, away = model.NewBoolVar(f"again{i}"), model.NewBoolVar(f"away{i}")
            self._choices.append((again, away))
            model.Add(again + away <= int(must or may))
            model.Add(away >= int(must))
            forward, recompute, offload, reload, turn, last = (
                Op(stage, kind, i) for kind in (_FORWARD, RECOMPUTE, OFFLOAD, RELOAD, window.turn, window.kinds[-1])
            )
            least, most = window.earliest(i) + window.seconds[_FORWARD], window.latest(i) - window.seconds[window.turn]
            busy.append(self._interval(recompute, least, most, again))
            down.append(self._interval(offload, least, most, away))
            up.append(self._interval(reload, least, most, away))
            self._follow((forward, recompute, turn), again)
            self._follow((forward, offload, reload, turn), away)
            if problem.policy.mode is Mode.INLINE:
                model.Add(self._start[recompute] >= self._bounds[1][i]).OnlyEnforceIf(again)
                model.Add(self._start[turn] == self._ended(recompute)).OnlyEnforceIf(again)
            comes = model.NewIntVar(0, window.step, f"comes{i}")
            for op, chosen in ((forward, (again.Not(), away.Not())), (recompute, (again,)), (reload, (away,))):
                model.Add(comes == self._start[op]).OnlyEnforceIf(*chosen)
            lives += [self._span(comes, last), self._span(self._start[forward], offload, away)]
            on_host.append(self._span(self._start[offload], reload, away))
            if (stash := i + problem.stash_of(stage)) in window.microbatches:
                self._follow((last, Op(stage, _FORWARD, stash)))
        model.AddNoOverlap(down)
        model.AddNoOverlap(up)
        model.AddCumulative(lives, [1] * len(lives), problem.places_of(stage))
        if (host := problem.policy.host_sets_of(stage)) is not None:
            model.AddCumulative(on_host, [1] * len(on_host), host)
        self._add_sums()
        return busy

    def _span(self, begin: Any, last: Op, *chosen: Any) -> Any:
        """From `begin` to the end of `last`."""
        length = self.model.NewIntVar(0, self._window.step, f"to {last}")
        make = self.model.NewOptionalIntervalVar if chosen else self.model.NewIntervalVar
        return make(begin, length, self._ended(last), *chosen, f"until {last}")

    def _add_sums(self) -> None:
        """Redundant constraints for the solver's proof: the stage's work, and its sets' time in slots, fit into the step."""
        window, seconds, places = self._window, self._window.seconds, self._window.problem.places_of(self._window.stage)
        back = sum(seconds[kind] for kind in window.kinds[1:])
        late, room = back - seconds[window.turn], window.step - window.head
        work = (seconds[_FORWARD] + back) * len(self._choices) + seconds[RECOMPUTE] * sum(
            again for again, _ in self._choices
        )
        self.model.Add(work <= room + min(0, min(places, len(self._choices)) * late - window.tail))
        lives = 0
        for deadline, gradient, (again, away) in zip(*self._bounds, self._choices):
            whole = max(0, gradient - deadline) + seconds[_FORWARD] + back
            lives += whole * (1 - again - away) + (seconds[RECOMPUTE] + back) * again
            lives += (seconds[_FORWARD] + 2 * seconds[OFFLOAD] + back) * away
        self.model.Add(lives <= places * (room - (0 if late else window.tail)))

    def starts(self, solver: Any) -> Starts:
        chosen: dict[tuple[Kind, int], Any] = {}
        for i, (again, away) in enumerate(self._choices):
            chosen |= {(RECOMPUTE, i): again, (OFFLOAD, i): away, (RELOAD, i): away}
        return {
            op: solver.Value(start)
            for op, start in self._start.items()
            if (var := chosen.get((op.kind, op.microbatch or 0))) is None or solver.BooleanValue(var)
        }
