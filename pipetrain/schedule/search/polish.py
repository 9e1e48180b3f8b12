"""Better orders by constraint programming (CP-SAT of ortools, where it is installed), and a proof of how good they are.

The variables are the start of each op and, for each set, whether it is kept. A stage runs one op at a time; each microbatch passes
the stages in order; a kept set holds one of its stage's activation slots from F on, another set from R on. Redundant constraints help
the solver: the work of a stage, and the time that its sets hold slots, must fit between the first microbatch's arrival at the stage
and the last one's way back to stage 0 (proofs in `bound.py`). They are linear in the number of kept sets.

Times are integers. Costs that are multiples of a unit stay exact; others are rounded down, by less than a 200,000th of the step,
so a proof for the rounded costs holds for the real ones, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import PASS_SEQUENCES, RECOMPUTE, Direction, Kind
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.search.list_order import Effort, ListedOrder, OrderProblem
from pipetrain.schedule.simulate import simulate

_DENOMINATORS = (1, 2, 3, 4, 5, 6, 8, 10, 20, 50, 100)
_PARTS_OF_A_STEP = 200_000
_PAUSE_SECONDS = 0.1
(_FORWARD,) = PASS_SEQUENCES[Direction.FORWARD][0]


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
    events = (event for event in simulate(start, whole.costs).events if event.op.kind.computes)
    model = _Model(cp_model, whole, {event.op: round(event.start) for event in events})
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.interleave_search = (
        True  # the worker alternates between proving bounds and improving the best order
    )
    solver.parameters.random_seed = 0
    if effort.steps is None:
        solver.parameters.max_time_in_seconds = effort.seconds
    else:
        solver.parameters.max_deterministic_time = effort.steps
    status = solved(solver, model.model)
    found = model.order(solver, unit) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return Polished(found, max(model.least, math.ceil(solver.BestObjectiveBound() - 1e-6)) * unit)


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


class _Model:
    """The variables and constraints of one problem, whose costs are whole numbers. `least` is the lower bound of `bound`.
    `hints` are the starts of the ops in the schedule from which the search starts."""

    def __init__(self, cp_model: Any, problem: OrderProblem, hints: Mapping[Op, int]) -> None:
        self.model = cp_model.CpModel()
        self._problem = problem
        self._microbatches = range(problem.num_microbatches)
        self._hints = hints
        most = round(max(self._hints[op] + self._seconds(op) for op in self._hints))
        self.least = math.ceil(problem.least_seconds() - 1e-6)
        self._horizon = max(self.least, most)
        self._start: dict[Op, Any] = {}
        self._kept: dict[tuple[int, int], Any] = {}  # of the stages that have a choice
        self._lives: dict[tuple[int, int], tuple[Any, Any]] = {}  # of each set: when it comes, and for how long
        self._end = self._new("step", self.least, self._horizon)
        for stage in range(problem.num_stages):
            self._add_stage(stage)
        for stage in range(problem.num_stages):
            self._add_links(stage)
        for stage in range(problem.first_backward, problem.num_stages):
            self._add_sums(stage)
        self.model.Minimize(self._end)
        self._hint()

    def order(self, solver: Any, unit: float) -> ListedOrder:
        """The ops of each stage by their starts."""
        kept = {place for place, var in self._kept.items() if solver.BooleanValue(var)}
        lanes: list[list[tuple[int, int, int, int, Op]]] = [[] for _ in range(self._problem.num_stages)]
        for number, (op, var) in enumerate(self._start.items()):
            if op.kind is not RECOMPUTE or (op.stage, op.microbatch) not in kept:
                start = solver.Value(var)
                # Of ops that start together, those of length 0 come first, in the order of a microbatch's path.
                lanes[op.stage].append((start, start + self._seconds(op), op.microbatch or 0, number, op))
        return ListedOrder(
            tuple(tuple(op for *_, op in sorted(lane)) for lane in lanes), solver.Value(self._end) * unit
        )

    def _seconds(self, op: Op) -> int:
        return round(self._problem.costs.of(op.kind)[op.stage])

    def _new(self, name: str, least: int, most: int) -> Any:
        return self.model.NewIntVar(least, most, name)

    def _add_op(self, op: Op) -> Any:
        """The interval of an op; an R has one only where its set is not kept."""
        start = self._start[op] = self._new(str(op), 0, self._horizon - self._seconds(op))
        if op.kind is not RECOMPUTE:
            return self.model.NewIntervalVar(start, self._seconds(op), start + self._seconds(op), str(op))
        kept = self._kept[op.stage, op.microbatch or 0]
        return self.model.NewOptionalIntervalVar(
            start, self._seconds(op), start + self._seconds(op), kept.Not(), str(op)
        )

    def _add_stage(self, stage: int) -> None:
        """Adds the ops of a stage: one runs at a time, and those of each kind in the order of microbatches."""
        problem, model = self._problem, self.model
        if problem.chooses(stage):
            self._kept |= {(stage, i): model.NewBoolVar(f"{stage}K{i}") for i in self._microbatches}
        kinds = problem.kinds_of(stage)
        model.AddNoOverlap([self._add_op(Op(stage, kind, i)) for i in self._microbatches for kind in kinds])
        for kind in kinds:
            for i in self._microbatches[1:]:
                first, second = Op(stage, kind, i - 1), Op(stage, kind, i)
                if kind is RECOMPUTE:
                    recomputed = self._kept[stage, i - 1].Not()
                    model.Add(self._start[second] >= self._start[first] + self._seconds(first) * recomputed)
                else:
                    model.Add(self._start[second] >= self._ended(first))
        if stage >= problem.first_backward:
            self._add_lives(stage)

    def _add_lives(self, stage: int) -> None:
        """Orders F, R and the backward of each microbatch, and adds the time in which its set is alive."""
        problem, model, places = self._problem, self.model, self._problem.places_of(stage)
        turn, last = problem.way_back[0], problem.way_back[-1]
        lives = []
        for i in self._microbatches:
            forward, back, end = Op(stage, _FORWARD, i), Op(stage, turn, i), Op(stage, last, i)
            if end != back:
                model.Add(self._start[end] >= self._ended(back))
            model.Add(self._end >= self._ended(end))
            opens = self._start[forward]
            if stage == problem.num_stages - 1:
                model.Add(self._start[back] == self._ended(forward))
            if (stage, i) in self._kept:
                kept, again = self._kept[stage, i], Op(stage, RECOMPUTE, i)
                model.Add(self._start[back] >= self._ended(forward))
                model.Add(self._start[again] >= self._ended(forward)).OnlyEnforceIf(kept.Not())
                model.Add(self._start[back] >= self._ended(again)).OnlyEnforceIf(kept.Not())
                opens = self._new(f"{stage}S{i}", 0, self._horizon)
                model.Add(opens == self._start[forward]).OnlyEnforceIf(kept)
                model.Add(opens == self._start[again]).OnlyEnforceIf(kept.Not())
                if problem.policy.mode is Mode.INLINE:
                    model.Add(self._start[back] == self._ended(again)).OnlyEnforceIf(kept.Not())
            length = self._new(f"{stage}L{i}", 0, self._horizon)
            self._lives[stage, i] = opens, length
            lives.append(model.NewIntervalVar(opens, length, self._ended(end), f"{stage}A{i}"))
            stash = i + problem.stash_of(stage)
            if stash in self._microbatches:
                model.Add(self._start[Op(stage, _FORWARD, stash)] >= self._ended(end))
        if places == 1:
            model.AddNoOverlap(lives)
        elif places < len(lives):
            model.AddCumulative(lives, [1] * len(lives), places)

    def _add_links(self, stage: int) -> None:
        """Each tensor comes from the neighbouring stage, by a link that carries one at a time."""
        problem, turn = self._problem, self._problem.way_back[0]
        for kind, source, hops, first in (
            (_FORWARD, stage - 1, problem.costs.hop_forward[stage - 1 : stage], 1),
            (turn, stage + 1, problem.costs.hop_backward[stage : stage + 1], problem.first_backward),
        ):
            if stage < first or not 0 <= source < problem.num_stages:
                continue
            hop, busy = round(hops[0]), None
            for i in self._microbatches:
                sent = self._ended(Op(source, kind, i))
                arrived = sent + hop
                if hop > self._seconds(Op(source, kind, i)):  # else no tensor ever waits for the link
                    arrived = self._new(f"{stage}{kind}{i} arrives", 0, self._horizon)
                    self.model.Add(arrived >= sent + hop)
                    if busy is not None:
                        self.model.Add(arrived >= busy + hop)
                    busy = arrived
                self.model.Add(self._start[Op(stage, kind, i)] >= arrived)
                again = Op(stage, RECOMPUTE, i)
                if kind is turn and again in self._start and problem.policy.mode is Mode.INLINE:
                    self.model.Add(self._start[again] >= arrived).OnlyEnforceIf(self._kept[stage, i].Not())

    def _add_sums(self, stage: int) -> None:
        """Two redundant constraints per stage: its work, and the time that its sets hold slots, fit between the arrival of the
        first microbatch and the last one's way back to stage 0.
        """
        problem, costs = self._problem, self._problem.costs
        places, microbatches = problem.places_of(stage), problem.num_microbatches
        turn, *rest = (costs.of(kind) for kind in problem.way_back)
        late = [sum(times) for times in zip(*rest)] or [0.0] * problem.num_stages
        before = sum(costs.forward[:stage]) + sum(costs.hop_forward[:stage])
        first = problem.first_backward
        tail = sum(turn[first:stage]) + sum(costs.hop_backward[first:stage]) + late[first]
        beyond = sum(costs.forward[stage + 1 :]) + sum(costs.hop_forward[stage:])
        beyond += sum(turn[stage + 1 :]) + sum(costs.hop_backward[stage:])
        kept = sum(var for (own, _), var in self._kept.items() if own == stage)
        recomputed = microbatches - kept if (stage, 0) in self._kept else 0
        work = round(microbatches * (costs.forward[stage] + turn[stage] + late[stage]))
        work = work + round(costs.recompute[stage]) * recomputed
        for backward, at_end, after in (
            (turn[stage], round(places * late[stage]), round(tail)),
            (turn[stage] + late[stage], 0, 0),
        ):
            room = self._end - round(before) - after
            self.model.Add(room >= work - at_end)
            if (stage, 0) in self._kept:
                of_kept = round(costs.forward[stage] + beyond + backward)
                of_recomputed = round(costs.recompute[stage] + backward)
                self.model.Add(places * room >= of_kept * kept + of_recomputed * recomputed)

    def _hint(self) -> None:
        """Gives the solver the complete order to start from, so that it has a solution at once."""
        last = self._problem.way_back[-1]
        for stage in range(self._problem.num_stages):
            again_at = 0
            for i in self._microbatches:
                again = Op(stage, RECOMPUTE, i)
                if (stage, i) in self._kept:
                    kept = again not in self._hints
                    self.model.AddHint(self._kept[stage, i], int(kept))
                    self.model.AddHint(self._start[again], self._hints.get(again, again_at))
                    again_at = again_at if kept else self._hints[again] + self._seconds(again)
                if (stage, i) in self._lives:
                    opens, length = self._lives[stage, i]
                    start = self._hints.get(again, self._hints[Op(stage, _FORWARD, i)])
                    end = Op(stage, last, i)
                    self.model.AddHint(length, self._hints[end] + self._seconds(end) - start)
                    if (stage, i) in self._kept:
                        self.model.AddHint(opens, start)
        for op, var in self._start.items():
            if op.kind is not RECOMPUTE:
                self.model.AddHint(var, self._hints[op])
        self.model.AddHint(self._end, self._horizon)

    def _ended(self, op: Op) -> Any:
        return self._start[op] + self._seconds(op)
