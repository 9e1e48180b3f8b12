"""The least time a step could take, whatever the order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import WAYS, Direction, Kind
from pipetrain.schedule.placement import Placement, stage_ranks_of
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule

Way = tuple[Kind, ...]  # the ops in which a microbatch goes back


def bound(
    costs: Costs,
    num_microbatches: int,
    *,
    policy: str | RecomputePolicy = "overlap",
    num_ranks: int | None = None,
    placement: Placement = "loop",
    first_backward: int = 0,
    split_backward: bool = False,
) -> float:
    """Seconds below which no step can be, for any order; `bound_of` says it for the sets that one schedule keeps.

    Every stage before the last is taken to send a second microbatch on before the first comes back, so that it recomputes
    all that it does not keep. `split_backward`: every backward is an I and a W, not a B.

    The proof is that of `bound_of`. As nothing fixes which sets are kept, stage s can keep few: a kept set lives
    from F to B (or I), at least L = f_s + b_s and the round trip through the stages after s. The `keep` places of a stage
    offer keep * W seconds of life in the window W = T - head - tail in which the stage runs, so that at most
    keep * W / L sets are kept and n_rec(s) >= m - keep * W / L. T is at least the least time that satisfies this.
    """
    wanted = RecomputePolicy.of(policy)
    way = WAYS[Direction.BACKWARD][-1 if split_backward else 0]
    ways = [Counter({way: num_microbatches})] * costs.num_stages
    stage_ranks = stage_ranks_of(placement, costs.num_stages, num_ranks)
    links = _Links(costs, stage_ranks, first_backward, ways, _places(wanted))

    def recompute(stage: int, step_seconds: float) -> float:
        return _least_recompute(links, stage, step_seconds, num_microbatches, wanted) * costs.recompute[stage]

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

    Where backward is split, I takes the place of B in every tail, and the last microbatch back runs its W at its end. All
    F, R and I of a rank come before its last I, and of its W all but those whose sets are alive then: with K places at
    most K of a stage. So T >= head + work - K w + tail. A W has nothing to wait for behind it: T >= head + work. And a
    microbatch runs its W on each stage, so T >= its way back to stage s, and w. Of several ways that the microbatches of a
    stage take back, each of these counts the shortest.
    For equal stages with K = m this is max((m+p-1)(f+i) + w + 2(p-1)c, max_s[s(f+c) + m(f+i+w) + n_rec(s) r]), and more.
    """
    links = _Links(costs, schedule.stage_ranks, schedule.first_backward, _ways_back(schedule), _places(schedule.policy))
    kept = Counter(stage for stage, _ in schedule.kept)

    def recompute(stage: int, _: float) -> float:
        sets = len(schedule.microbatches) if stage >= schedule.first_backward else 0
        return (sets - kept[stage]) * costs.recompute[stage]

    return _least_time(links, len(schedule.microbatches), recompute)


def _places(policy: RecomputePolicy) -> int | None:
    """The sets of a stage that may be alive at once; None: any number."""
    return None if policy.mode is Mode.NEVER else policy.ahead + policy.keep


def _ways_back(schedule: Schedule) -> list[Counter[Way]]:
    """Per stage, how many microbatches go back in which way; empty where nothing needs a gradient."""
    found: list[Counter[Way]] = [Counter() for _ in range(schedule.num_stages)]
    for stage in range(schedule.first_backward, schedule.num_stages):
        for microbatch in schedule.microbatches:
            found[stage][tuple(op.kind for op in schedule.way(Direction.BACKWARD, stage, microbatch))] += 1
    return found


class _Links:
    """Path times of one microbatch, and the work of each stage: 0 where there is no message or no backward.

    `turn` is from the arrival of a gradient to that of the stage's own input, `after` what then is left of the backward;
    both of the shortest way. `backward` is what all microbatches take, `late` how much of it may follow the last turn.
    """

    def __init__(
        self,
        costs: Costs,
        stage_ranks: tuple[int, ...],
        first_backward: int,
        ways: Sequence[Counter[Way]],
        places: int | None,
    ) -> None:
        edges = range(len(stage_ranks) - 1)
        crossing = [stage_ranks[edge] != stage_ranks[edge + 1] for edge in edges]
        self.stage_ranks = stage_ranks
        self.first_backward = first_backward
        self.forward = costs.forward
        self.hop_forward = [costs.hop_forward[edge] if crossing[edge] else 0.0 for edge in edges]
        self.hop_backward = [
            costs.hop_backward[edge] if crossing[edge] and edge >= first_backward else 0.0 for edge in edges
        ]
        self.turn, self.after, self.backward, self.late = [], [], [], []
        for stage, counts in enumerate(ways):
            needed = counts if stage >= first_backward else Counter[Way]()
            seconds = {way: [costs.of(kind)[stage] for kind in way] for way in needed}
            rests = {way: sum(parts[1:]) for way, parts in seconds.items()}
            self.turn.append(min((parts[0] for parts in seconds.values()), default=0.0))
            self.after.append(min(rests.values(), default=0.0))
            self.backward.append(sum(count * sum(seconds[way]) for way, count in needed.items()))
            left = sorted((rests[way] for way in needed.elements()), reverse=True)
            self.late.append(sum(left[:places]))

    def head(self, stage: int) -> float:
        return sum(self.forward[:stage]) + sum(self.hop_forward[:stage])

    def beyond(self, stage: int) -> float:
        """From the end of F of `stage` through the later stages back to the start of its backward."""
        there = sum(self.forward[stage + 1 :]) + sum(self.hop_forward[stage:])
        return there + sum(self.turn[stage + 1 :]) + sum(self.hop_backward[stage:])

    def tail(self, stage: int) -> float:
        """From the last turn of `stage`, or its last F, to the end of the step."""
        if stage < self.first_backward:
            return self.beyond(stage) + self.end()
        return sum(self.turn[:stage]) + sum(self.hop_backward[:stage]) + self.end()

    def end(self) -> float:
        """What is left of the last microbatch after its last turn."""
        return self.after[self.first_backward] if self.first_backward < len(self.after) else 0.0


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
    life = links.forward[stage] + links.beyond(stage) + links.turn[stage]  # at least: to its last turn
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
    way = links.head(0) + links.forward[0] + links.beyond(0) + links.turn[0] + links.end()  # of one microbatch
    least = max(
        [way, *(links.head(s) + links.forward[s] + links.beyond(s) + links.turn[s] + links.after[s] for s in stages)]
    )
    for rank in set(links.stage_ranks):
        own = [stage for stage in stages if links.stage_ranks[stage] == rank]
        work = sum(microbatches * links.forward[s] + links.backward[s] + recompute[s] for s in own)
        before_last_turn = work - sum(links.late[s] for s in own)
        head = min(map(links.head, own))
        least = max(least, head + work, head + before_last_turn + min(map(links.tail, own)))
    for hop in (*links.hop_forward, *links.hop_backward):  # the tensors of one link, between the first's and last's way
        least = max(least, way + (microbatches - 1) * hop)
    return least
