"""Better orders by changing the rule a little at a time: what there is without ortools, and where its search starts.

A step changes the limit of a stage, what it prefers, which sets it may keep, or which F go before a B, and stays where that is no
slower (Hansen and Mladenovic 1997 call it a reduced variable neighbourhood search: one to three changes at a time, at random).
Where stages are recomputed in parts, many rules give steps of one length, and the way to a shorter one leads over longer ones: there a slower
rule may be gone to as well, ever less likely (Kirkpatrick, Gelatt and Vecchi 1983, simulated annealing).
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace

from pipetrain.schedule.search.list_order import ListedOrder, ListRule, OrderProblem, Prefers, list_by, rules_of

_MOST_CHANGES = 3
_SEED = 0
_WARMTH = 0.005  # of a step, at the start: a rule that is so much slower is gone to with a chance of 1/e
_COLD = 0.03  # of that, at the end


@dataclass(frozen=True)
class Effort:
    """How long to search: seconds of the clock; or, for the same result on any machine, `rules` tried by `climb` and CP-SAT's `steps`."""

    seconds: float
    rules: int | None = None
    steps: float | None = None


def climb(problem: OrderProblem, effort: Effort, least_seconds: float) -> ListedOrder:
    """The best order of all rules that were tried; done when its step is `least_seconds`."""
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
