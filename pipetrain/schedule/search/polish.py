"""Better orders by constraint programming (CP-SAT of ortools, where it is installed), and a proof of how good they are.

The variables are the start of each op and, for each set, whether it is recomputed or copied to the host. A stage runs one op at a
time; each microbatch passes the stages in order; a kept set holds one of its stage's activation slots from F on, another set from R
on. Redundant constraints help the solver: the work of a stage, and the time that its sets hold slots, must fit between the first
microbatch's arrival at the stage and the last one's way back to stage 0 (proofs in `bound.py`).

`polish` has one model of all stages, without copies. `by_stage.py` has a model of one stage.

Times are integers. Costs that are multiples of a unit stay exact; others are rounded down, by less than a 200,000th of the step,
so a proof for the rounded costs holds for the real ones, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import FORWARD, OFFLOAD, PASS_SEQUENCES, RECOMPUTE, RELOAD, Direction, Kind
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Mode, Offload
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.search.list_order import Effort, ListedOrder, OrderProblem
from pipetrain.schedule.simulate import simulate

_DENOMINATORS = (1, 2, 3, 4, 5, 6, 8, 10, 20, 50, 100)
_PARTS_OF_A_STEP = 200_000
_PAUSE_SECONDS = 0.1

Bounds = tuple[list[int], list[int]]  # when each F must have ended, and when each gradient is there
Starts = Mapping[Op, float]  # of the ops of a stage


@dataclass(frozen=True)
class Polished:
    """The best order found, None if none is better, and a lower bound on any step."""

    order: ListedOrder | None
    least_seconds: float


def can_polish() -> bool:
    """Whether ortools is installed."""
    return importlib.util.find_spec("ortools") is not None


def polish(problem: OrderProblem, start: Schedule, effort: Effort) -> Polished:
    """A better order than that of `start`, a schedule of `problem`, if one is found in time."""
    cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")  # not at the top: it takes a second
    unit = unit_of(problem.costs, simulate(start, problem.costs).step_seconds)
    whole = replace(problem, costs=in_units(problem.costs, unit))
    events = [event for event in simulate(start, whole.costs).events if event.op.kind.computes]
    least = math.ceil(whole.least_seconds() - 1e-6)
    horizon = max(least, round(max(event.end for event in events)))
    model = cp_model.CpModel()
    end = model.NewIntVar(least, horizon, "step")
    stages = [StageOps(model, Window(whole, stage, horizon)) for stage in range(problem.num_stages)]
    for own in stages:
        *_, last = own.window.kinds
        model.Add(end >= own.ended(own.window.ops(last)[-1]))
        if own.window.turn in own.window.kinds:
            own.add_sums(end)
        # R's in the order of their microbatches: `waits.py` takes the recompute lane to have it.
        for first, second in itertools.pairwise(op for op in own.chosen if op.kind is RECOMPUTE):
            seconds = own.window.seconds[RECOMPUTE] * own.chosen[first]
            model.Add(own.start[second] >= own.start[first] + seconds)
        own.hint({event.op: event.start for event in events if event.op.stage == own.window.stage})
    for edge, (one, other) in enumerate(itertools.pairwise(stages)):
        _add_link(one, other, FORWARD, round(whole.costs.hop_forward[edge]))
        _add_link(other, one, one.window.turn, round(whole.costs.hop_backward[edge]))
    for op, back in zip(stages[-1].window.ops(FORWARD), stages[-1].window.ops(stages[-1].window.turn)):
        model.Add(stages[-1].start[back] == stages[-1].ended(op))
    model.AddHint(end, horizon)
    model.Minimize(end)
    solver = solver_of(cp_model, effort, seed=0)
    status = solved(solver, model)
    found = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = ListedOrder(tuple(own.in_order(solver) for own in stages), solver.Value(end) * unit)
    return Polished(found, max(least, math.ceil(solver.BestObjectiveBound() - 1e-6)) * unit)


def solver_of(cp_model: Any, effort: Effort, seed: int) -> Any:
    """A solver that stops after `effort`. It has one worker, so the same effort in steps gives the same result on any machine."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.interleave_search = True  # it alternates between proving bounds and improving the best order
    solver.parameters.random_seed = seed
    if effort.steps is None:
        solver.parameters.max_time_in_seconds = effort.seconds
    else:
        solver.parameters.max_deterministic_time = effort.steps
    return solver


def solved(solver: Any, model: Any) -> int:
    """Solves on another thread, so that Ctrl-C ends the search and the command at once. Returns the status."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solver.Solve, model)
        try:
            status: int = solving.result()
        except BaseException:
            while not solving.done():  # before it has begun there is nothing to stop
                solver.StopSearch()
                wait([solving], timeout=_PAUSE_SECONDS)
            raise
    return status


def unit_of(costs: Costs, step_seconds: float) -> float:
    """The unit of time: one of which all times are whole multiples, or if there is none, a small part of the step."""
    times = [seconds for kind in Kind if kind.row.cost for seconds in costs.of(kind)]
    for denominator in _DENOMINATORS:
        if all(math.isclose(time * denominator, round(time * denominator), rel_tol=1e-12) for time in times):
            return 1 / denominator
    return step_seconds / _PARTS_OF_A_STEP


def in_units(costs: Costs, unit: float, *, nearest: bool = False) -> Costs:
    """`costs` in whole units, rounded down, or to the `nearest`."""

    def whole(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(math.floor(time / unit + (0.5 if nearest else 1e-6))) for time in times)

    input_gradient, weight_gradient = (whole(costs.of(kind)) for kind in PASS_SEQUENCES[Direction.BACKWARD][-1])
    names = ("forward", "backward", "recompute", "hop_forward", "hop_backward", "offload")
    times = {name: whole(getattr(costs, name)) for name in names}
    return Costs(**times, input_gradient=input_gradient, weight_gradient=weight_gradient)


class Window:
    """A stage of a problem in a step that takes `step`: its costs in whole units, and the time in which its ops may run.

    `bounds`: when each F must have ended and when each gradient is there, if the next stage has an order already.
    """

    def __init__(self, problem: OrderProblem, stage: int, step: int, bounds: Bounds | None = None) -> None:
        costs, first = problem.costs, problem.first_backward
        self.problem, self.stage, self.step = problem, stage, step
        self.microbatches = range(problem.num_microbatches)
        count = problem.num_microbatches
        self.deadlines, self.gradients = bounds or ([step] * count, [0] * count)
        self.kinds = (FORWARD, *problem.way_back) if stage >= first else (FORWARD,)
        self.seconds = {kind: round(costs.of(kind)[stage]) for kind in (*self.kinds, RECOMPUTE, OFFLOAD)}
        self.turn = problem.way_back[0]
        turns, before = costs.of(self.turn), range(stage)
        # The first F comes after the F and hops of earlier stages. The others follow at most as fast as the slowest of these.
        self.head = round(sum(costs.forward[:stage]) + sum(costs.hop_forward[:stage]))
        self.pace = round(max((*costs.forward[:stage], *costs.hop_forward[:stage]), default=0))
        # From the end of F through the later stages to the backward, and from there to the end of the step.
        self.beyond = round(sum(costs.forward[stage + 1 :]) + sum(costs.hop_forward[stage:]))
        self.beyond += round(sum(turns[stage + 1 :]) + sum(costs.hop_backward[stage:]))
        late = sum(sum(costs.of(kind)[first : first + 1]) for kind in problem.way_back[1:])
        self.tail = round(sum(turns[first:stage]) + sum(costs.hop_backward[first:stage]) + late)
        self.pace_back = round(max((*(turns[s] for s in before[first:]), *costs.hop_backward[first:stage]), default=0))

    def earliest(self, number: int) -> int:
        """The least start of F."""
        return self.head + number * max(self.pace, self.seconds[FORWARD])

    def latest(self, number: int) -> int:
        """The largest end of B or I."""
        return self.step - self.tail - (self.microbatches[-1] - number) * max(self.pace_back, self.seconds[self.turn])

    def ops(self, kind: Kind) -> list[Op]:
        """The ops of a kind, one per microbatch; none if there is no backward."""
        return [Op(self.stage, kind, i) for i in self.microbatches if kind in self.kinds]

    def span(self, op: Op) -> tuple[int, int]:
        """The least start and the largest end of an op."""
        number = op.microbatch or 0
        if op.kind is FORWARD:
            return self.earliest(number), self.deadlines[number]
        return self.gradients[number], self.latest(number) if op.kind is self.turn else self.step

    def between(self, number: int) -> tuple[int, int]:
        """The least start and the largest end of an R or a copy: after F, before its set is read."""
        return self.earliest(number) + self.seconds[FORWARD], self.latest(number) - self.seconds[self.turn]

    def ended(self, op: Op, start: Any) -> Any:
        return start + self.seconds[OFFLOAD if op.kind is RELOAD else op.kind]


class StageOps:
    """The ops of one stage in a CP-SAT model. `start` has the variable of each op; an R or a copy runs only if its variable in
    `chosen` is true."""

    def __init__(self, model: Any, window: Window) -> None:
        self.model, self.window = model, window
        self.start: dict[Op, Any] = {}
        self.chosen: dict[Op, Any] = {}
        busy = [self._interval(op, *window.span(op)) for kind in window.kinds for op in window.ops(kind)]
        in_turn = [window.ops(kind) for kind in window.kinds]
        for ops in (*in_turn, *zip(*in_turn)):
            self._follow(ops)
        if window.turn in window.kinds:
            busy += self._add_sets()
        model.AddNoOverlap(busy)

    def ended(self, op: Op) -> Any:
        return self.window.ended(op, self.start[op])

    def starts(self, solver: Any) -> Starts:
        """When each op starts, without those that were not chosen."""
        found = {op: solver.Value(start) for op, start in self.start.items()}
        return {op: at for op, at in found.items() if op not in self.chosen or solver.BooleanValue(self.chosen[op])}

    def in_order(self, solver: Any) -> tuple[Op, ...]:
        """The ops by their starts. Of ops that start together, those of length 0 come first, in the order of a microbatch's path."""
        starts, path = self.starts(solver), (FORWARD, RECOMPUTE, *self.window.problem.way_back)
        keys = {op: (at, self.window.ended(op, at), op.microbatch, path.index(op.kind)) for op, at in starts.items()}
        return tuple(sorted(keys, key=keys.__getitem__))

    def hint(self, starts: Starts) -> None:
        """Gives the solver an order of the stage to start from."""
        for op, start in starts.items():
            if op in self.start:  # a stage with a slot for each set has no R here, but the schedule may have one
                self.model.AddHint(self.start[op], math.floor(start))
        for op, chosen in self.chosen.items():
            if op.kind is not RELOAD:  # it has the variable of its OFFLOAD
                self.model.AddHint(chosen, int(op in starts))

    def _interval(self, op: Op, least: int, most: int, *chosen: Any) -> Any:
        """The interval of an op. If the variables `chosen` are true, the op runs, and all of it between `least` and `most`."""
        seconds = self.window.ended(op, 0)
        start = self.start[op] = self.model.NewIntVar(least, max(least, most - seconds), str(op))
        make = self.model.NewOptionalIntervalVar if chosen else self.model.NewIntervalVar
        return make(start, seconds, start + seconds, *chosen, str(op))

    def _follow(self, ops: Iterable[Op], *chosen: Any) -> None:
        for first, second in itertools.pairwise(ops):
            self.model.Add(self.start[second] >= self.ended(first)).OnlyEnforceIf(*chosen)

    def _add_sets(self) -> list[Any]:
        """Adds the choice for each set, and the slots that the set takes. Returns the intervals of R."""
        window, model, stage, problem = self.window, self.model, self.window.stage, self.window.problem
        runs: dict[Kind, list[Any]] = {kind: [] for kind in (RECOMPUTE, OFFLOAD, RELOAD)}
        lives, on_host = list[Any](), list[Any]()
        for i in window.microbatches:
            forward, turn, last = (Op(stage, kind, i) for kind in (FORWARD, window.turn, window.kinds[-1]))
            back: dict[Op, Any] = {}  # the last op of each way
            for way in self._ways_back():
                chosen, ops = model.NewBoolVar(f"{way[0]}{i}"), [Op(stage, kind, i) for kind in way]
                for op in ops:
                    self.chosen[op] = chosen
                    runs[op.kind].append(self._interval(op, *window.between(i), chosen))
                self._follow((forward, *ops, turn), chosen)
                back[ops[-1]] = chosen
                if way[1:]:
                    lives.append(self._span(self.start[forward], ops[0], chosen))
                    on_host.append(self._span(self.start[ops[0]], ops[1], chosen))
                elif problem.policy.mode is Mode.INLINE:
                    model.Add(self.start[ops[0]] >= window.gradients[i]).OnlyEnforceIf(chosen)
                    model.Add(self.start[turn] == self.ended(ops[0])).OnlyEnforceIf(chosen)
            lives.append(self._span(self._comes(forward, back), last))
            if (stash := i + problem.stash_of(stage)) in window.microbatches:
                self._follow((last, Op(stage, FORWARD, stash)))
        for lane in (OFFLOAD, RELOAD):
            model.AddNoOverlap(runs[lane])
        for spans, room in ((lives, problem.places_of(stage)), (on_host, problem.policy.host_sets_of(stage))):
            if room == 1:
                model.AddNoOverlap(spans)
            elif room is not None and room < len(spans):
                model.AddCumulative(spans, [1] * len(spans), room)
        return runs[RECOMPUTE]

    def _ways_back(self) -> list[tuple[Kind, ...]]:
        """The ops by which a set that is not kept may come back to the device."""
        problem = self.window.problem
        must = problem.policy.offload is Offload.ALWAYS
        recomputes = problem.chooses(self.window.stage) and not must
        copies = must or (recomputes and problem.policy.offloads)
        return [(RECOMPUTE,)] * recomputes + [(OFFLOAD, RELOAD)] * copies

    def _comes(self, forward: Op, back: Mapping[Op, Any]) -> Any:
        """When a set takes its slot for its backward: at the start of F if it is kept, else at that of the chosen op of `back`."""
        if not back:
            return self.start[forward]
        comes = self.model.NewIntVar(0, self.window.step, f"{forward} comes")
        must = self.window.problem.policy.offload is Offload.ALWAYS
        self.model.AddLinearConstraint(sum(back.values()), int(must), 1)
        self.model.Add(comes == self.start[forward]).OnlyEnforceIf(*(chosen.Not() for chosen in back.values()))
        for op, chosen in back.items():
            self.model.Add(comes == self.start[op]).OnlyEnforceIf(chosen)
        return comes

    def _span(self, begin: Any, last: Op, *chosen: Any) -> Any:
        """From `begin` to the end of `last`."""
        length = self.model.NewIntVar(0, self.window.step, f"to {last}")
        make = self.model.NewOptionalIntervalVar if chosen else self.model.NewIntervalVar
        return make(begin, length, self.ended(last), *chosen, f"until {last}")

    def add_sums(self, end: Any) -> None:
        """Redundant constraints: the work of the stage, and the time that its sets hold slots, fit into a step that takes `end`."""
        window, seconds, places = self.window, self.window.seconds, self.window.problem.places_of(self.window.stage)
        turn, late = seconds[window.turn], sum(seconds[kind] for kind in window.kinds[2:])
        again, away = (sum(var for op, var in self.chosen.items() if op.kind is kind) for kind in (RECOMPUTE, OFFLOAD))
        work = len(window.microbatches) * (seconds[FORWARD] + turn + late) + seconds[RECOMPUTE] * again
        for backward, at_end, after in ((turn, places * late, window.tail), (turn + late, 0, 0)):
            room = end - window.head - after
            self.model.Add(work - at_end <= room)
            if not self.chosen:
                continue
            lives = again * (seconds[RECOMPUTE] + backward)
            lives += away * (seconds[FORWARD] + 2 * seconds[OFFLOAD] + backward)
            for i, deadline, gradient in zip(window.microbatches, window.deadlines, window.gradients):
                ways = (Op(window.stage, kind, i) for kind in (RECOMPUTE, OFFLOAD))
                whole = seconds[FORWARD] + max(window.beyond, gradient - deadline) + backward
                lives += whole * (1 - sum(self.chosen[op] for op in ways if op in self.chosen))
            self.model.Add(lives <= places * room)


def _add_link(source: StageOps, to: StageOps, kind: Kind, hop: int) -> None:
    """The ops of `kind` on stage `to` wait for their tensors, which come over a link that carries one at a time."""
    busy = None
    for given, reader in zip(source.window.ops(kind), to.window.ops(kind)):
        arrived = source.ended(given) + hop
        if hop > source.window.seconds[kind]:  # else no tensor ever waits for the link
            sent, arrived = arrived, source.model.NewIntVar(0, source.window.step, f"{reader} arrives")
            source.model.Add(arrived >= sent)
            if busy is not None:
                source.model.Add(arrived >= busy + hop)
            busy = arrived
        source.model.Add(to.start[reader] >= arrived)
        again = reader._replace(kind=RECOMPUTE)
        if kind is not FORWARD and again in to.chosen and to.window.problem.policy.mode is Mode.INLINE:
            source.model.Add(to.start[again] >= arrived).OnlyEnforceIf(to.chosen[again])
