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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipetrain.schedule.families import AUTO
from pipetrain.schedule.kinds import FORWARD, OFFLOAD, RECOMPUTE
from pipetrain.schedule.offload import CopyRule, Placing, frees_place
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.search.list_order import Effort, ListedOrder, OrderProblem
from pipetrain.schedule.search.polish import Bounds, StageOps, Starts, Window, in_units, solved, solver_of, unit_of

# Shares of the effort, one per attempt at a step: many short ones find more than a few long ones.
_SHARES = (0.01, 0.01, 0.02, 0.02, 0.04, 0.04, 0.08, 0.08, 0.16, 1.0)
_FINEST = 1 / 500  # of a step: the search ends when it could not shorten a step by more
# Durations of R from the end of F to its deadline.
_AHEAD = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 1e6)
_TRIES = list(itertools.product(_AHEAD, map(CopyRule, (2.0, 2.0, 2.5, 3.0, 3.0, 2.5), (0.0, 0.5, 0.25, 0.0, 0.5, 1.0))))
random.Random(0).shuffle(_TRIES)  # so that the first few differ in all three parameters
MOST_PLACED = 2**16  # microbatches that `by_rule` places: a second or two
_ATTEMPTS = 8  # attempts that `by_rule` makes at most
_MOST_HINTED = 2**13  # microbatches that the rule places for one stage before the solver begins
_ROUNDING = 1e-6
_COARSE = 4  # coarse units in the shortest F
_VARIANTS = 3  # of the last stage

Lanes = tuple[tuple[Op, ...], ...]  # of each stage the ops in the order in which they take and free slots


def by_rule(problem: OrderProblem, seconds: float, most_placed: int = MOST_PLACED) -> Iterator[ListedOrder]:
    """Orders whose steps are shorter than `seconds`, each shorter than the one before; the same orders on any machine. The rule
    places about `most_placed` microbatches in all."""
    unit = unit_of(problem.costs, seconds)
    whole, attempts = replace(problem, costs=in_units(problem.costs, unit)), itertools.count()
    most = max(1, most_placed // (_ATTEMPTS * _VARIANTS * problem.num_stages * problem.num_microbatches))

    def attempt(step: int) -> Lanes | None:
        tries = (_in_turn(whole, step, variant, lambda window: _place(window, most)) for variant in range(_VARIANTS))
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
    real = seconds
    for unit in units:
        costs = in_units(problem.costs, unit, nearest=unit > fine)
        solver, best = _Solver(replace(problem, costs=costs), effort.share(1 / len(units))), real
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


def _in_turn(problem: OrderProblem, step: int, variant: int, solve: Callable[[Window], Starts | None]) -> Lanes | None:
    """The ops of each stage, within the bounds that the next stage sets. None: `solve` finds no order for a stage."""
    lanes, bounds = list[tuple[Op, ...]](), None
    for stage in reversed(range(problem.num_stages)):
        window = Window(problem, stage, step, bounds)
        if stage == problem.num_stages - 1:
            starts: Starts | None = _last_stage(window, variant)
        else:
            starts = solve(window) if _may_fit(window) else None
        if starts is None:
            return None
        lanes.append(_in_order(window, starts))
        bounds = _bounds_before(window, starts) if stage else None
    return tuple(reversed(lanes))


def _may_fit(window: Window) -> bool:
    """Whether each op, without the others, has time between its bounds."""
    spans = ((window.span(op), kind) for kind in window.kinds for op in window.ops(kind))
    return all(least + window.seconds[kind] <= most for (least, most), kind in spans)


def _keeps_to(window: Window, starts: Starts) -> bool:
    """Whether every op has a start and ends in time."""
    ops = [op for kind in window.kinds for op in window.ops(kind)]
    return all(op in starts and window.ended(op, starts[op]) <= window.span(op)[1] + _ROUNDING for op in ops)


def _in_order(window: Window, starts: Starts) -> tuple[Op, ...]:
    """The ops in the order in which they take and free slots. At the same moment, those that free a slot come first."""
    moments = {op: window.ended(op, start) if frees_place(op) else start for op, start in starts.items()}
    return tuple(sorted(starts, key=lambda op: (moments[op], not frees_place(op), op.microbatch)))


def _life(window: Window, starts: Mapping[Op, Any]) -> Any:
    """The time in flight of all microbatches together, less a constant."""
    return sum(starts[op] for op in window.ops(window.turn)) - sum(starts[op] for op in window.ops(FORWARD))


def _bounds_before(window: Window, starts: Starts) -> Bounds:
    """Deadlines of F and arrivals of gradients for the stage before. A link carries one tensor at a time."""
    costs = window.problem.costs
    hop, back = round(costs.hop_forward[window.stage - 1]), round(costs.hop_backward[window.stage - 1])
    deadlines, gradients = [window.step], [0]
    for op in reversed(window.ops(FORWARD)):
        deadlines.append(min(math.floor(starts[op] + _ROUNDING), deadlines[-1]) - hop)
    for op in window.ops(window.turn):
        gradients.append(max(math.ceil(window.ended(op, starts[op]) - _ROUNDING), gradients[-1]) + back)
    return deadlines[:0:-1], gradients[1:] or [0] * len(window.microbatches)


def _last_stage(window: Window, variant: int) -> Starts:
    """Starts with each backward right after its F. Variants: at the pace of the slowest stage, early or late; evenly spread."""
    problem, costs, last = window.problem, window.problem.costs, window.microbatches[-1]
    work = [sum(costs.of(kind)[s] for kind in (FORWARD, *problem.way_back)) for s in range(problem.num_stages)]
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


def _place(window: Window, most: int) -> Starts | None:
    """The starts of a stage by the rule: of `most` tries, that with the least time in flight. None: all miss a deadline."""
    best: Starts | None = None
    for ahead, rule in _TRIES[:most]:
        starts = dict(_placing(window, ahead).place(rule).starts)
        _put_off(window, starts)
        if _keeps_to(window, starts) and (best is None or _life(window, starts) < _life(window, best)):
            best = starts
    return best


def _placing(window: Window, ahead: float) -> Placing:
    """The stage alone: F in the order of deadlines, `ahead` durations of R before them; backwards in the order of gradients."""
    problem, stage = window.problem, window.stage
    ready: dict[Op, float] = {}
    for i, deadline, gradient in zip(window.microbatches, window.deadlines, window.gradients):
        begin = max(window.earliest(i), deadline - window.seconds[FORWARD] - ahead * window.seconds[RECOMPUTE])
        full = i - problem.stash_of(stage)  # the microbatch that must have ended before, by `stash`
        ready[Op(stage, FORWARD, i)] = max(begin, window.gradients[full] + _ROUNDING) if full >= 0 else begin
        ready |= {Op(stage, kind, i): gradient for kind in window.kinds[1:]}
    lane = sorted(ready, key=lambda op: (ready[op], op.kind is not FORWARD, op.microbatch))
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


def _put_off(window: Window, starts: dict[Op, float]) -> None:
    """Moves each F as late as its deadline, the next op of the stage, and the OFFLOAD or R of its set allow."""
    following = math.inf
    for op in sorted((op for op in starts if op.kind.computes), key=starts.__getitem__, reverse=True):
        if op.kind is FORWARD:
            number = op.microbatch or 0
            own = (starts.get(Op(op.stage, kind, number), math.inf) for kind in (OFFLOAD, RECOMPUTE))
            latest = min(window.deadlines[number], following, *own) - window.seconds[FORWARD]
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

    def _solve(self, window: Window) -> Starts | None:
        key, start = (window.stage, window.step, str((window.deadlines, window.gradients))), time.monotonic()
        if key in self._best:
            return self._best[key]
        if key not in self._hints:
            self._hints[key] = _place(window, max(1, _MOST_HINTED // len(window.microbatches)))
        hint = self._hints[key]
        effort, in_steps = (self._end - self._spent) / 2, self._effort.steps is not None
        model = self._cp_model.CpModel()
        own = StageOps(model, window)
        if window.turn in window.kinds:
            own.add_sums(window.step)
        if hint:
            own.hint(hint)
        model.Minimize(_life(window, own.start))
        share = Effort(max(effort, 0.05), steps=max(effort, 0.01) if in_steps else None)
        solver = solver_of(self._cp_model, share, seed=next(self._attempts))
        status = solved(solver, model)
        self._spent += solver.ResponseProto().deterministic_time if in_steps else time.monotonic() - start
        found = own.starts(solver) if status in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE) else hint
        if status in (self._cp_model.OPTIMAL, self._cp_model.INFEASIBLE):
            self._best[key] = found
        return found
