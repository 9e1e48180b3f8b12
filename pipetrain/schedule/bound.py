"""The least time a step could take, whatever the order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule


def bound(
    costs: Costs,
    num_microbatches: int,
    *,
    policy: str | RecomputePolicy = "overlap",
    family: str | None = None,
    num_ranks: int | None = None,
    warmup: int | Sequence[int] | None = None,
    first_backward: int = 0,
) -> float:
    """Seconds below which no step can be, for any order or for the orders of one family.

    With a family, the recomputed microbatches are counted in its schedule. Without one, every stage before the last
    is taken to send a second microbatch on before the first comes back, so that it recomputes all that it does not keep.

    The proof is that of `bound_of`. Where no family fixes which sets are kept, stage s can keep few: a kept set lives
    from F to B, at least L = f_s + b_s and the round trip through the stages after s. The `keep` places of a stage
    offer keep * W seconds of life in the window W = T - head - tail in which the stage runs, so that at most
    keep * W / L sets are kept and n_rec(s) >= m - keep * W / L. T is at least the least time that satisfies this.
    """
    policy = RecomputePolicy.of(policy)
    stages = costs.num_stages
    ranks = stages if num_ranks is None else num_ranks
    if family is not None:
        schedule = make_schedule(
            family,
            num_stages=stages,
            num_microbatches=num_microbatches,
            num_ranks=ranks,
            recompute=policy,
            warmup=warmup,
            costs=costs,
            first_backward=first_backward,
        )
        return bound_of(schedule, costs)
    links = _Links(costs, tuple(stage % ranks for stage in range(stages)), first_backward)

    def recompute(stage: int, step_seconds: float) -> float:
        return _least_recompute(links, stage, step_seconds, num_microbatches, policy) * costs.recompute[stage]

    return _least_time(links, num_microbatches, recompute)


def bound_of(schedule: Schedule, costs: Costs) -> float:
    """Seconds below which no order of the ops of `schedule` can be; messages take their hop, ranks one op at a time.

    Proof. Let head_s be the time in which one microbatch gets from stage 0 to stage s: F and hops of the stages
    before. No F of stage s starts earlier. Let tail_s be the time from the end of an op of stage s to the end of the
    step: after a B, the microbatch still runs B and hops on the stages before; after the F of a stage without a B, it
    still runs on to the last stage and back. So all the work of a rank lies between the least head and the least tail
    of its stages, one op at a time, and T >= head + work + tail. Likewise a link carries its m tensors one after the
    other, between the first that can reach it and the last that leaves it. T is at least the greatest of these.
    For equal stages this is max((m+p-1)(f+b) + 2(p-1)c, max_s[(m+s)(f+b) + 2sc + n_rec(s) r]).
    """
    links = _Links(costs, schedule.stage_ranks, schedule.first_backward)
    kept = Counter(stage for stage, _ in schedule.kept)

    def recompute(stage: int, _: float) -> float:
        sets = schedule.num_microbatches if stage >= schedule.first_backward else 0
        return (sets - kept[stage]) * costs.recompute[stage]

    return _least_time(links, schedule.num_microbatches, recompute)


class _Links:
    """Path times of one microbatch: F and B per stage, hops per edge, 0 where there is no message or no B."""

    def __init__(self, costs: Costs, stage_ranks: tuple[int, ...], first_backward: int) -> None:
        edges = range(len(stage_ranks) - 1)
        crossing = [stage_ranks[edge] != stage_ranks[edge + 1] for edge in edges]
        self.stage_ranks = stage_ranks
        self.first_backward = first_backward
        self.forward = costs.forward
        self.backward = [b if stage >= first_backward else 0.0 for stage, b in enumerate(costs.backward)]
        self.hop_forward = [costs.hop_forward[edge] if crossing[edge] else 0.0 for edge in edges]
        self.hop_backward = [
            costs.hop_backward[edge] if crossing[edge] and edge >= first_backward else 0.0 for edge in edges
        ]

    def head(self, stage: int) -> float:
        return sum(self.forward[:stage]) + sum(self.hop_forward[:stage])

    def beyond(self, stage: int) -> float:
        """From the end of F of `stage` through the later stages back to the start of its B."""
        there = sum(self.forward[stage + 1 :]) + sum(self.hop_forward[stage:])
        return there + sum(self.backward[stage + 1 :]) + sum(self.hop_backward[stage:])

    def tail(self, stage: int) -> float:
        before_b = sum(self.backward[:stage]) + sum(self.hop_backward[:stage])
        return before_b if stage >= self.first_backward else self.beyond(stage)


def _least_recompute(
    links: _Links, stage: int, step_seconds: float, microbatches: int, policy: RecomputePolicy
) -> float:
    """How many R stage `stage` cannot avoid in a step of this length; not a whole number where sets are kept."""
    if policy.mode is Mode.NEVER or stage < links.first_backward:
        return 0.0
    last = len(links.stage_ranks) - 1
    if policy.last_stage is LastStage.AUTO and (stage == last or microbatches == 1):
        return 0.0
    if policy.keep == 0:
        return float(microbatches)
    life = links.forward[stage] + links.beyond(stage) + links.backward[stage]
    window = step_seconds - links.head(stage) - links.tail(stage)
    return max(0.0, microbatches - policy.keep * window / life) if life > 0 else 0.0


def _least_time(links: _Links, microbatches: int, recompute: Callable[[int, float], float]) -> float:
    """The least T for which `recompute(stage, T)`, which does not grow with T, leaves time for all the work."""

    def needed(step_seconds: float) -> float:
        return _bound(links, microbatches, [recompute(stage, step_seconds) for stage in range(len(links.stage_ranks))])

    low, high = needed(math.inf), needed(0.0)
    if math.isinf(high) or low == high:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= middle else (middle, high)
    return low


def _bound(links: _Links, microbatches: int, recompute: Sequence[float]) -> float:
    stages = range(len(links.stage_ranks))
    total = links.head(0) + links.forward[0] + links.beyond(0) + links.backward[0]
    least = total
    for rank in set(links.stage_ranks):
        own = [stage for stage in stages if links.stage_ranks[stage] == rank]
        work = sum(microbatches * (links.forward[s] + links.backward[s]) + recompute[s] for s in own)
        least = max(least, min(map(links.head, own)) + work + min(map(links.tail, own)))
    for hop in (*links.hop_forward, *links.hop_backward):
        least = max(
            least, total + (microbatches - 1) * hop
        )  # the tensors of one link, between the first's and last's way
    return least
