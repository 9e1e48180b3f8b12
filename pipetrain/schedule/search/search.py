"""`pipeline.schedule=auto`: the best order that the rule, the named families and a search find, and a proof of how good it is.

    rule, families ──► best ──► search from there (`climb`, with ortools then `polish.py`) ──► FoundSchedule
                                      └ its orders are simulated like all: the simulated step counts

With `recompute.offload=auto` a quarter of the seconds goes to this search, without copies: its order is a candidate. `by_stage.py` takes
the rest, and tries shorter steps.

The user's cache folder keeps the result for each problem: the same search is not repeated, and a longer one starts from the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipetrain.schedule.bound import proven_gap
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import csv_of_order, order_of_csv
from pipetrain.schedule.families import ALWAYS_SPLIT, WITH_WARMUP, ComputeLanes
from pipetrain.schedule.make import held_to, make, problem_of, sound
from pipetrain.schedule.policy import Keep, Offload
from pipetrain.schedule.recompute import order_of
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import MOST_COMPARED, ScheduleSpec
from pipetrain.schedule.search.by_stage import by_solver
from pipetrain.schedule.search.list_order import Effort, ListedOrder, climb
from pipetrain.schedule.search.polish import can_polish, polish
from pipetrain.schedule.simulate import simulate

_FAMILIES = ("gpipe", "1f1b", "zb-h1")  # with one stage per rank
_MOST_POLISHED = 8192  # stages x microbatches: beyond, a CP-SAT model takes gigabytes for nothing
_SHARE_WITHOUT_COPIES = 0.25  # of the seconds, for the order to start from
_SHARE_OF_CLIMB = 0.1  # of the seconds: from a better start constraint programming gets further
_CACHE_FORMAT = 1  # of cached orders and of the problems they solve; a new number ignores old files
_SAME = 1 + 1e-9  # steps this close are equal


@dataclass(frozen=True)
class CachedOrder:
    """An order, a lower bound on the step of every order that `bound` covers, and the seconds of the search."""

    order: ComputeLanes
    least_seconds: float
    searched_seconds: float


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule whose step takes `seconds` on the costs of the search; no order that `bound` covers takes less than `least_seconds`."""

    schedule: Schedule
    seconds: float
    least_seconds: float

    @property
    def is_proven(self) -> bool:
        return proven_gap(self.seconds, self.least_seconds) == 0.0


def best_schedule(
    spec: ScheduleSpec,
    costs: Costs,
    effort: Effort,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> FoundSchedule:
    """The best schedule for `spec`, of the family `auto`, that is found with `effort`; unless large, it has passed `check`.

    `cache` is the folder for results; None: they are not stored. `say` gets a line if the search takes time. With an effort of
    0 seconds only the rule, the named families and the stored result are tried. A large problem has more than `MOST_COMPARED`
    stages x microbatches, and no copies: only the rule is tried, and the caller checks its schedule.

    Raises:
        ValueError: as `make`.
    """
    spec = replace(spec, costs=costs)
    copies = spec.policy.offloads and spec.first_backward < spec.num_stages
    if not copies and spec.num_stages * spec.num_microbatches > MOST_COMPARED:
        schedule = make(spec)
        return FoundSchedule(schedule, simulate(schedule, costs).step_seconds, problem_of(spec, costs).least_seconds())
    known = None if cache is None else read_order(cache, spec, costs)
    has_searched = known is not None and known.searched_seconds >= effort.seconds
    schedules = _schedules(spec, known)
    if copies and spec.policy.offload is Offload.AUTO:  # so the result is never slower than the best without copies
        plain = replace(spec, policy=replace(spec.policy, offload=Offload.NONE))
        first = effort.share(0.0 if has_searched else _SHARE_WITHOUT_COPIES)
        without = best_schedule(plain, costs, first, cache, say).schedule
        schedules = itertools.chain(schedules, [replace(without, policy=spec.policy)])
    found = _found(spec, costs, schedules, 0.0 if known is None else known.least_seconds)
    if effort.seconds == 0 or found.is_proven or has_searched or (copies and not _polishes(spec)):
        return found
    what = "with copies to host memory" if copies else "for pipeline.schedule=auto"
    say(f"searching for an order {what}, for {effort.seconds:g} s at most (pipeline.search_seconds)")
    found = (_search_with_copies if copies else _search)(spec, costs, effort, found)
    if cache is not None:
        write_order(cache, spec, costs, CachedOrder(order_of(found.schedule), found.least_seconds, effort.seconds))
    return found


def _search(spec: ScheduleSpec, costs: Costs, effort: Effort, start: FoundSchedule) -> FoundSchedule:
    """The best that changed rules and, with ortools, constraint programming find from `start`."""
    problem = problem_of(spec, costs)
    polishes = _polishes(spec) and effort.steps != 0
    first = replace(effort, seconds=effort.seconds * _SHARE_OF_CLIMB) if polishes else effort
    climbed = climb(problem, first, start.least_seconds)
    found = _found(spec, costs, [start.schedule, *sound(spec, climbed)], start.least_seconds)
    if polishes and not found.is_proven:
        polished = polish(problem, found.schedule, replace(effort, seconds=effort.seconds - first.seconds))
        better = [] if polished.order is None else sound(spec, polished.order)
        found = _found(spec, costs, [found.schedule, *better], max(found.least_seconds, polished.least_seconds))
    return found


def _search_with_copies(spec: ScheduleSpec, costs: Costs, effort: Effort, found: FoundSchedule) -> FoundSchedule:
    """The best of `found` and the orders of `by_stage.py`."""

    def step_of(order: ListedOrder) -> float:
        return min((simulate(schedule, costs).step_seconds for schedule in sound(spec, order)), default=math.inf)

    problem, left = problem_of(spec, costs.beside_copies()), effort.share(1 - _SHARE_WITHOUT_COPIES)
    for order in by_solver(problem, found.seconds, left, step_of):
        found = _found(spec, costs, [found.schedule, *sound(spec, order)], found.least_seconds)
    return found


def _polishes(spec: ScheduleSpec) -> bool:
    small = spec.num_stages * spec.num_microbatches <= _MOST_POLISHED
    return can_polish() and small and not spec.policy.in_parts


def _schedules(spec: ScheduleSpec, known: CachedOrder | None = None) -> Iterator[Schedule]:
    """The candidates without a search: the order found before, the rule's, those of named families."""
    yield from [] if known is None else sound(spec, known.order)
    yield make(spec)
    policy = replace(spec.policy, keep=Keep.AUTO)
    for family in _FAMILIES:
        halves = spec.split_backward and family not in ALWAYS_SPLIT
        if family in ALWAYS_SPLIT and not spec.split_backward:
            continue
        for warmup in (None, 2 * spec.num_stages, 3 * spec.num_stages) if family in WITH_WARMUP else (None,):
            named = replace(spec, family=family, policy=policy, warmup=warmup, split_backward=halves)
            with contextlib.suppress(ValueError):  # it holds more than the stash
                yield held_to(spec, order_of(make(named)))


def _found(
    spec: ScheduleSpec, costs: Costs, schedules: Iterable[Schedule], least_seconds: float = 0.0
) -> FoundSchedule:
    """The fastest of `schedules`; of equal ones the first. Raises the error of `check` if the fastest so far is unsound."""
    best, seconds = None, math.inf
    for schedule in schedules:
        taken = simulate(schedule, costs).step_seconds
        if taken * _SAME < seconds:
            check(schedule)
            best, seconds = schedule, taken
    assert best is not None, "the rule makes an order for every problem"
    least = max(problem_of(spec, costs).least_seconds(), least_seconds)
    return FoundSchedule(best, seconds, min(seconds, least))


# What was found before, a file per problem in the user's cache folder: $XDG_CACHE_HOME or ~/.cache, pipetrain/orders ------------------


def read_order(folder: Path, spec: ScheduleSpec, costs: Costs) -> CachedOrder | None:
    """What was found for this problem; None where nothing was, or where the file cannot be read."""
    path = _cache_file(folder, spec, costs)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        order = order_of_csv(found["order"], str(path), spec.shape)
        return CachedOrder(order, float(found["least_seconds"]), float(found["searched_seconds"]))
    return None


def write_order(folder: Path, spec: ScheduleSpec, costs: Costs, found: CachedOrder) -> None:
    """Keeps what was found, where the folder may be written."""
    path = _cache_file(folder, spec, costs)
    text = json.dumps({**asdict(found), "order": csv_of_order(found.order)}, indent=2)
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(text + "\n")
        draft.replace(path)


def _cache_file(folder: Path, spec: ScheduleSpec, costs: Costs) -> Path:
    policy, times = spec.policy, asdict(costs)
    copies = (times.pop("offload"), times.pop("copy_contention"), policy.offload, policy.host_sets)
    problem = (
        _CACHE_FORMAT,
        times,
        spec.stage_ranks,
        spec.num_microbatches,
        (policy.mode, policy.sets, policy.stash, policy.segments, policy.parts, policy.shares),
        spec.first_backward,
        spec.transport_ahead,
        spec.split_backward,
        *(copies if policy.offloads else ()),
    )
    return folder / f"{hashlib.sha256(json.dumps(problem).encode()).hexdigest()[:32]}.json"
