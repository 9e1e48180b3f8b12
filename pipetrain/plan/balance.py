"""How many layers each stage gets: equal numbers, equal work, or what makes the step of a schedule shortest.

A stage that recomputes runs F, R and B, the last one as a rule F and B, so equal stages keep it waiting. From equal stages layers
are moved, one or two at a time, as long as the simulated step gets shorter. No clock is read: all ranks and a resumed run agree.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipetrain.schedule.bound import bound
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.make import make
from pipetrain.schedule.policy import CutStage, Keep, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.simulate import simulate

Balance = tuple[int, ...]  # layers per stage

_HALVINGS = 50
_ROUNDING = 1 + 1e-9
_WORTH = 0.995  # of the step: smaller gains are within the error of costs
_MOST_TRIED = 2**16  # stages x microbatches of all steps that are simulated: some two seconds
_MOST_AT_ONCE = 2**12  # stages x microbatches of one step
_MAKING = 24  # steps that are simulated while a schedule by the rule of `auto` is made
_FAR_STAGES = 8  # up to so many, a layer may go to any stage, and two at once; beyond, to the next


def balance_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers per stage, the remainder to the last stages.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} stages (pipeline.num_stages): each stage needs a layer; "
            f"use at most {num_layers} stages"
        )
    share, rest = divmod(num_layers, num_stages)
    return tuple(share + (stage >= num_stages - rest) for stage in range(num_stages))


def balance_by_work(work: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers per stage such that the stage with the most work has as little as can be; `work` has an entry per layer, 0 or more.

    A step takes (m - 1) times the slowest stage and once all of them, so evening out the others gains nothing. Equal numbers are taken if as
    good. Else each stage is near the mean of what is left to it and those after it, for the sake of memory.

    Raises:
        ValueError: fewer layers than stages.
    """
    even = balance_evenly(len(work), num_stages)
    sums = list(itertools.accumulate(work, initial=0.0))
    most = _least_maximum(work, sums, num_stages)
    bounds = itertools.pairwise(itertools.accumulate(even, initial=0))
    if max(sums[end] - sums[start] for start, end in bounds) <= most:
        return even
    needed = _stages_needed(sums, most)
    counts, start, num_layers = [], 0, len(work)
    for left in range(num_stages, 1, -1):
        mean = (sums[-1] - sums[start]) / left
        room = bisect.bisect_right(sums, sums[start] + most) - 1
        ends = range(start + 1, min(room, num_layers - left + 1) + 1)
        end = min((end for end in ends if needed[end] < left), key=lambda end: abs(sums[end] - sums[start] - mean))
        counts.append(end - start)
        start = end
    return (*counts, num_layers - start)


def cut_by_work(work: Sequence[float], balance: Sequence[int]) -> CutStage:
    """Cuts a stage of `balance` layers into parts of about equal work; `work` has an entry per layer of the model, such as bytes."""
    starts = list(itertools.accumulate(balance, initial=0))

    def cut(stage: int, num_parts: int) -> Sequence[int]:
        return balance_by_work(work[starts[stage] : starts[stage + 1]], num_parts)

    return cut


def costs_by_work(balance: Sequence[int], work: Sequence[float] | None, mean: Costs) -> Costs:
    """What stages of `balance` layers cost, each by its share of the `work` of all layers (None: of their number); `mean` is what all stages
    would cost with equal shares. Hops and shares of bytes stay as they are.
    """
    work = work if work is not None and sum(work) > 0 else (1.0,) * sum(balance)
    sums = list(itertools.accumulate(work, initial=0.0))
    starts = list(itertools.accumulate(balance, initial=0))
    shares = [(sums[end] - sums[start]) * len(balance) / sums[-1] for start, end in itertools.pairwise(starts)]
    timed = ("forward", "backward", "recompute", "input_gradient", "weight_gradient", "reduce")
    return replace(mean, **{name: tuple(map(operator.mul, getattr(mean, name), shares)) for name in timed})


def balance_by_step(
    start: Sequence[int], spec: ScheduleSpec, costs_of: Callable[[Balance], Costs], given: Schedule | None = None
) -> Balance:
    """The layers per stage with the shortest simulated step that moves of layers find from `start`, or `start` itself.

    `spec` is what the schedule is made from, without `costs`, its parts for any balance; `given` is a schedule that there is already.
    `costs_of` says what stages of a balance cost. Moves are tried one by one and in pairs, those with the least `bound` first; none
    if one step has thousands of microbatches x stages, or one rank has all stages and waits for nobody.
    """
    start = tuple(start)
    if len(set(spec.stage_ranks)) < 2 or spec.num_stages * spec.num_microbatches > _MOST_AT_ONCE:
        return start
    steps = _Steps(spec, costs_of, given)
    with suppress(ValueError):  # it cannot be made: whoever makes it to run reports that
        best, seconds = start, steps.seconds(start)
        enough = seconds * _WORTH
        while (better := _improved(best, seconds, steps)) is not None:
            best, seconds = better
        return best if seconds <= enough else start
    return start


def balance_told(balance: Sequence[int], start: Sequence[int], policy: RecomputePolicy) -> str:
    """One line that says why `balance` is not `start`; empty where it is."""
    if tuple(balance) == tuple(start):
        return ""
    last = len(balance) - 1
    equal = f"shorter simulated step than {', '.join(map(str, start))}"
    lean = policy.mode is not Mode.NEVER and policy.keeps_at_once(last)
    why = f"the last stage does not recompute ({equal})" if lean else equal
    return f"balance {', '.join(map(str, balance))} layers: {why}"


@dataclass
class _Steps:
    """Simulated steps of one schedule under different balances (layers per stage), as many as `left` allows."""

    spec: ScheduleSpec
    costs_of: Callable[[Balance], Costs]
    given: Schedule | None
    left: int = _MOST_TRIED

    def __post_init__(self) -> None:
        self._known: dict[Balance, float] = {}
        self._remade = self.given is None and (self.spec.family == AUTO or self.spec.policy.in_parts)
        self._schedule = None if self._remade else self.given or make(self.spec)
        policy = self.spec.policy if self.given is None else self.given.policy
        self._loose = replace(policy, keep=Keep.AUTO) if self.spec.family == AUTO else policy

    def seconds(self, balance: Balance) -> float:
        """Raises:
        ValueError: there is no such schedule for stages of so many layers.
        """
        if balance not in self._known:
            self.left -= self.spec.num_stages * self.spec.num_microbatches * (_MAKING if self._remade else 1)
            costs = self.costs_of(balance)
            self._known[balance] = simulate(self._of(balance, costs), costs).step_seconds
        return self._known[balance]

    def least_seconds(self, balance: Balance) -> float:
        """No more than the step takes, for most schedules."""
        spec, policy = self.spec, self._loose.of_layers(balance)
        return bound(
            self.costs_of(balance),
            spec.num_microbatches,
            policy=policy,
            placement=spec.stage_ranks,
            first_backward=spec.first_backward if self.given is None else self.given.first_backward,
            split_backward=spec.split_backward,
        )

    def _of(self, balance: Balance, costs: Costs) -> Schedule:
        if self._schedule is None:
            policy = self.spec.policy.of_layers(balance)
            return make(replace(self.spec, policy=policy, costs=costs if self.spec.family == AUTO else None))
        if not self._schedule.policy.in_parts:
            return self._schedule
        return replace(self._schedule, policy=self._schedule.policy.of_layers(balance))


def _improved(best: Balance, seconds: float, steps: _Steps) -> tuple[Balance, float] | None:
    """The best of one move, and where none is better of two; None: no better one is found."""
    far = len(best) <= _FAR_STAGES
    for count in (1, 2) if far else (1,):
        found, options = None, []
        for balance in moved(best, count, far=far):
            with suppress(ValueError):  # a stage would have fewer layers than parts
                options.append((steps.least_seconds(balance), balance))
        for least, balance in sorted(options):
            if least * _ROUNDING >= seconds or steps.left <= 0:
                break
            with suppress(ValueError):
                taken = steps.seconds(balance)
                if taken * _ROUNDING < seconds:
                    found, seconds = balance, taken
        if found is not None:
            return found, seconds
    return None


def moved(balance: Balance, count: int, *, far: bool) -> Iterator[Balance]:
    """What `count` moves make of `balance`, each once, where every stage has a layer left. In a move, a layer leaves a stage, another stage gets one,
    the next if not `far`, and the stages between pass one on."""
    pairs = [pair for pair in itertools.permutations(range(len(balance)), 2) if far or abs(pair[0] - pair[1]) == 1]
    seen = {balance}
    for some in itertools.combinations_with_replacement(pairs, count):
        counts = list(balance)
        for giver, taker in some:
            counts[giver] -= 1
            counts[taker] += 1
        found = tuple(counts)
        if min(found) >= 1 and found not in seen:
            seen.add(found)
            yield found


def _least_maximum(work: Sequence[float], sums: Sequence[float], num_stages: int) -> float:
    """The least work that the heaviest of `num_stages` stages can have, and a billionth more: sums of floats are not exact."""
    low, high = max(work), sums[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _stages_needed(sums, middle)[0] <= num_stages:
            high = middle
        else:
            low = middle
    return high * _ROUNDING


def _stages_needed(sums: Sequence[float], most: float) -> list[int]:
    """Per layer: how many stages it and all that follow need, where no stage has more than `most`."""
    num_layers = len(sums) - 1
    needed = [0] * (num_layers + 1)
    for start in reversed(range(num_layers)):
        end = bisect.bisect_right(sums, sums[start] + most, lo=start + 1) - 1
        needed[start] = 1 + needed[max(end, start + 1)]
    return needed
