"""Ranks whose ops take longer than they should: than at the start of the run, or than those of ranks with equal work.

Load on the machine that slows every rank alike makes no straggler: a rank is compared with the others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipetrain.plan.mesh import RankPlace
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.op import Kind

LIMIT = 1.3  # times as slow: less is noise
EARLY_STEPS = 8  # the start that later steps are compared with, after the first step, which warms up
WINDOW_STEPS = 8  # a rank is slow if it is so in the median of so many steps

_Key = tuple[int, Kind]


@dataclass(frozen=True)
class Straggler:
    """Ops of one kind on one rank took up to `ratio` times as long as they should, from `since_step` on."""

    rank: int
    kind: str  # of an op that computes
    ratio: float
    since_step: int
    against: str  # `start`: its own first steps, the other ranks' taken into account; `others`: ranks with equal work


class StragglerWatch:
    """Is given each step's timelines, and remembers a few numbers per rank.

    `work` says what a place of a replica has to do; ranks with the same value are compared with each other, and so are those of one
    place in several replicas. `ranks`: which rank has which place in which replica; without, there is one replica.
    """

    def __init__(self, work: Mapping[int, Hashable], ranks: Sequence[RankPlace] = ()) -> None:
        self._ranks = {(where.replica, where.place): where.rank for where in ranks}
        self._places = {where.rank: where.place for where in ranks}
        self._given_work = work
        self._early: dict[_Key, list[float]] = defaultdict(list)
        self._latest: dict[_Key, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=WINDOW_STEPS))
        self._slow: dict[_Key, Straggler] = {}  # at present
        self._longest: dict[_Key, tuple[int, Straggler]] = {}  # with the number of steps that it lasted
        self._first_step: int | None = None

    def add(self, step: int, *timelines: Timeline) -> None:
        """Step number `step` was measured, on each replica."""
        if self._first_step is None:
            self._first_step = step
            return
        for key, seconds in self._seconds(timelines).items():
            if len(self._early[key]) < EARLY_STEPS:
                self._early[key].append(seconds)
            else:
                self._latest[key].append((step, seconds))
        grown = {
            key: statistics.median(seconds for _, seconds in latest) / statistics.median(self._early[key])
            for key, latest in self._latest.items()
            if len(latest) == WINDOW_STEPS
        }
        for key, ratio in grown.items():  # how much slower it is than at the start, as far as the other ranks are not
            others = [value for (rank, _), value in grown.items() if rank != key[0]]
            self._follow(key, ratio / max(statistics.median(others), 1.0) if others else ratio)

    def stragglers(self) -> tuple[Straggler, ...]:
        """By rank and kind: those that were slow for `WINDOW_STEPS` steps or more, each with its longest such time."""
        found = {key: straggler for key, (_, straggler) in self._longest.items()}
        for straggler in self._unequal():
            found.setdefault((straggler.rank, Kind(straggler.kind)), straggler)
        return tuple(found[key] for key in sorted(found, key=lambda key: (key[0], key[1].value)))

    def _follow(self, key: _Key, ratio: float) -> None:
        if ratio <= LIMIT:
            self._slow.pop(key, None)
            return
        latest = self._latest[key]
        if key not in self._slow:
            limit = LIMIT * statistics.median(self._early[key])
            since = next(step for step, seconds in latest if seconds > limit)
            self._slow[key] = Straggler(key[0], key[1].value, ratio, since, "start")
        slow = self._slow[key] = replace(self._slow[key], ratio=max(ratio, self._slow[key].ratio))
        lasted = latest[-1][0] - slow.since_step + 1
        if lasted >= max(WINDOW_STEPS, self._longest.get(key, (0, slow))[0]):
            self._longest[key] = (lasted, slow)

    def _unequal(self) -> Iterator[Straggler]:
        """Ranks that were slow from the start: against the others with the same work."""
        usual = {key: statistics.median(early) for key, early in self._early.items() if len(early) == EARLY_STEPS}
        for (rank, kind), seconds in usual.items():
            others = [
                value
                for (other, same), value in usual.items()
                if same is kind and other != rank and self._work(other) == self._work(rank)
            ]
            if others and (ratio := seconds / statistics.median(others)) > LIMIT:
                yield Straggler(rank, kind.value, ratio, self._first_step or 1, "others")

    def _work(self, rank: int) -> Hashable:
        """What is equal for ranks that have the same to do."""
        place = self._places.get(rank, rank)
        return place if self._given_work.get(place) is None else ("work", self._given_work[place])

    def _seconds(self, timelines: Sequence[Timeline]) -> dict[_Key, float]:
        """The median time of an op of each kind on each rank, in one step."""
        spent: dict[_Key, list[float]] = defaultdict(list)
        for replica, timeline in enumerate(timelines):
            for event in timeline.events:
                if event.op.kind.computes:
                    rank = self._ranks.get((replica, event.rank), event.rank)
                    spent[rank, event.op.kind].append(event.end - event.start)
        return {key: statistics.median(seconds) for key, seconds in spent.items()}
