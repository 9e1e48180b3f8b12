"""Better orders by changing the rule a little at a time: what there is without ortools, and where its search starts.

A step changes the limit of a stage, what it prefers, which sets it may keep, or which F go before a B, and stays where that is no
slower (Hansen and Mladenovic 1997 call it a reduced variable neighbourhood search: one to three changes at a time, at random).
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from pipetrain.schedule.list_order import ListedOrder, ListRule, OrderProblem, Prefers, list_by, rules_of

_MOST_CHANGES = 3
_SEED = 0


@dataclass(frozen=True)
class Effort:
    """How long to search: seconds of the clock; or, for the same result on any machine, `rules` tried by `climb` and CP-SAT's `steps`."""

    seconds: float
    rules: int | None = None
    steps: float | None = None


def climb(problem: OrderProblem, effort: Effort, least_seconds: float) -> ListedOrder:
    """The best order of all rules that were tried; done when its step is `least_seconds`."""
    best, rule = min(((list_by(problem, rule), rule) for rule in rules_of(problem)), key=lambda pair: pair[0].seconds)
    chance = random.Random(_SEED)
    deadline, tried = time.monotonic() + effort.seconds, 0
    enough = least_seconds * (1 + 1e-9)
    while best.seconds > enough:
        if (time.monotonic() >= deadline) if effort.rules is None else (tried >= effort.rules):
            break
        changed = rule
        for _ in range(chance.randint(1, _MOST_CHANGES)):
            changed = _changed(problem, changed, chance)
        order, tried = list_by(problem, changed), tried + 1
        if order.seconds <= best.seconds:
            best, rule = order, changed
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
