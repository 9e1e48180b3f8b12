"""The least time a step could take, whatever the order."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.kinds import OFFLOAD, PASS_SEQUENCES, Direction, Kind
from pipetrain.schedule.op import Op
from pipetrain.schedule.placement import Placement, stage_ranks_of
from pipetrain.schedule.policy import Mode, Offload, RecomputePolicy
from pipetrain.schedule.reduce import reduces_of
from pipetrain.schedule.schedule import Schedule

Choice = tuple[int, int]  # how many sets of a stage are kept, and how many are offloaded; the others are recomputed
Way = tuple[Kind, ...]  # the kinds of ops that make up the backward of a microbatch


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
    """A lower bound, in seconds, on the step of every order in which no stage before the last runs a B right after its own F.

    (Such a B would keep its set at no cost. With one microbatch the bound counts this, so it holds for every order.) `bound_of`
    gives it for the sets that one schedule keeps. `split_backward`: every backward is an I and a W, not a B. The proof is that
    of `bound_of`, but n_kept(s) is not known here: `policy` says which numbers of sets a stage may keep. T is the least time
    in which each stage, with one of these numbers, has time for its R and slots for its sets.
    """
    wanted = RecomputePolicy.of(policy)
    wanted.check_stages(costs.num_stages)
    way = PASS_SEQUENCES[Direction.BACKWARD][-1 if split_backward else 0]
    ways = [Counter({way: num_microbatches})] * costs.num_stages
    links = _Links(costs, stage_ranks_of(placement, costs.num_stages, num_ranks), first_backward, ways, wanted)
    choices: list[Sequence[Choice]] = []
    for stage in range(costs.num_stages):
        at_once = wanted.keeps_at_once(stage) and (stage == costs.num_stages - 1 or num_microbatches == 1)
        if wanted.mode is Mode.NEVER or at_once:
            choices.append([(num_microbatches, 0)])
        elif wanted.offload is Offload.ALWAYS:
            choices.append([(0, num_microbatches)])
        elif wanted.offloads:
            choices.append([links.best_of(stage, number, num_microbatches) for number in range(num_microbatches + 1)])
        else:
            choices.append([(number, 0) for number in range(num_microbatches + 1 if wanted.keeps else 1)])
    return _least_time(links, num_microbatches, choices)


def bound_of(schedule: Schedule, costs: Costs) -> float:
    """A lower bound, in seconds, on the step of any order of the ops of `schedule`. A message takes its hop; a rank runs one op at a time.

    Proof. Let head_s be the time in which one microbatch gets from stage 0 to stage s: F and hops of the stages before. No F of
    stage s starts earlier. Let tail_s be the least time from the end of an op of stage s to the end of the step. After a B, the
    microbatch still runs B and hops on the stages before. After the F of a stage without a B, it still runs to the last stage and
    back. So all the work of a rank lies between the least head and the least tail of its stages, one op at a time: T >= head + work
    + tail. A link carries its m tensors one after the other, which gives the same inequality for links. T is at least the greatest of these.
    For equal stages (s keeps n_kept(s) sets, recomputes n_rec(s)): max((m+p-1)(f+b) + 2(p-1)c, max_s[(m+s)(f+b) + 2sc + n_rec(s) r]).

    Split backward. Each tail has I in place of B, and ends with the W of the step's last microbatch. All F, R and I of a rank come before
    its last I. Its W come before that I too, except those of sets still alive then: at most K per stage, with K slots. So T >= head + work
    - K w + tail. Nothing has to follow a W: T >= head + work. Each microbatch also runs a W on each stage s: T >= (the time until its I
    there ends) + w. If a stage has backwards of both forms, B and I W, the time of one microbatch is that of the shorter form. For equal
    stages with K = m this is at least max((m+p-1)(f+i) + w + 2(p-1)c, max_s[s(f+c) + m(f+i+w) + n_rec(s) r]).

    Slot-time. A kept set holds an activation slot of its stage from the start of F to the end of the backward. This takes at least
    L = f + the round trip through the later stages + b. A recomputed set holds a slot from the start of R, which the rank runs before
    the backward: at least r + b. All of this lies between head and tail, in K slots: n_kept L + n_rec (r + b) <= K (T - head - tail).
    With k parts per stage, a slot holds one part. A kept set then takes k slots, so the first term is k n_kept L. The parts of a
    recomputed set take their shares of r + b one after the other, so the second term stays. With a split backward the inequality holds
    twice: with b = i and this tail, and with b = i + w and a tail of 0.

    Copies. An offloaded set holds a slot from F to the end of OFFLOAD and from the start of RELOAD to the end of the backward:
    at least f + 2 o + b, if a copy takes o. So n_kept L + n_off (f + 2 o + b) + n_rec (r + b) <= K (T - head - tail). OFFLOAD
    run one at a time, the first after an F, and a RELOAD and a backward follow the last: T >= head + f + (n_off + 1) o + b +
    tail, for n_off > 0. With k parts, F holds k slots, and each part then holds one for its share of 2 o + b: k f + 2 o + b in
    all. The RELOAD and backward after the last OFFLOAD are those of one part and may be short: T >= head + f + n_off o + tail.

    Gradients. A REDUCE_GRAD of stage s comes after all F, R and backwards of s. Those of one stage run one after the other: T
    >= head_s + work of s + reduces of s. A REDUCE_GRAD also comes after the whole path of one microbatch, from stage 0 to the
    end of its backward on s: T >= that path + reduces of s. If s has parts, the REDUCE_GRAD of part j comes after all F, and
    after R and B of parts j and above. So T >= head_s + m f + work of parts j and above + reduces of parts j and below.
    """
    ways, reduces = _ways_back(schedule), reduces_of(schedule)
    links = _Links(costs, schedule.stage_ranks, schedule.first_backward, ways, schedule.policy, reduces)
    kept, away = (Counter(stage for stage, _ in sets) for sets in (schedule.kept, schedule.offloaded))
    choices = [[(kept[stage], away[stage])] for stage in range(schedule.num_stages)]
    return _least_time(links, schedule.num_microbatches, choices)


def _ways_back(schedule: Schedule) -> list[Counter[Way]]:
    """Per stage, how many microbatches have a backward of each form; empty for a stage without a backward."""
    found: list[Counter[Way]] = [Counter() for _ in range(schedule.num_stages)]
    for stage in range(schedule.first_backward, schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            ops = schedule.way(Direction.BACKWARD, stage, microbatch)
            found[stage][tuple(dict.fromkeys(op.kind for op in ops))] += 1  # all parts of a B take as long as B
    return found


def _reduces_by_stage(
    costs: Costs, policy: RecomputePolicy, reduces: Sequence[Op]
) -> dict[int, list[tuple[float, float]]]:
    """`_Links.reduces`: per stage a pair for each part, the last part first. The seconds include the sums with other stages."""
    found: dict[int, list[tuple[float, float]]] = {}
    for stage in sorted({op.stage for op in reduces}):
        own = [op for op in reduces if op.stage == stage]
        shared = sum(max(costs.of(op.kind, True)[one] for one in (stage, op.peer)) for op in own if op.peer is not None)
        in_parts = policy.num_parts(stage) > 1
        parts = sorted((op.part or 0 for op in own if op.peer is None), reverse=True)
        shares = [policy.share_of(stage, part if in_parts else None) for part in parts]
        seconds = costs.of(own[0].kind)[stage]
        found[stage] = [
            (sum(shares[: place + 1]), sum(shares[place:]) * seconds + shared) for place in range(len(shares))
        ] or [(1.0, shared)]
    return found


class _Links:
    """Seconds of one microbatch's path and of each stage's work: 0 where there is no message or no backward.

    `turn[s]` is B or I: the time from the gradient of a stage's output to that of its input. `after[s]` is the rest of that backward.
    Both are those of the shortest form. `backward[s]` sums up all microbatches; `late[s]` is the part of it that may follow the last turn.
    `reduces[s]` has a pair (share, seconds) per REDUCE_GRAD, which starts when this share of the stage's R and backward has run. `seconds`
    lasts from its start to the end of the stage's last REDUCE_GRAD. `reduce[s]` is `seconds` of the last pair.
    """

    def __init__(
        self,
        costs: Costs,
        stage_ranks: tuple[int, ...],
        first_backward: int,
        ways: Sequence[Counter[Way]],
        policy: RecomputePolicy,
        reduces: Iterable[Op] = (),
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
        self.recompute, self.copy = costs.recompute, costs.of(OFFLOAD)
        self.places = [policy.places_of(stage) for stage in range(len(stage_ranks))]
        self.parts = [policy.num_parts(stage) for stage in range(len(stage_ranks))]
        self.reduces = _reduces_by_stage(costs, policy, tuple(reduces))
        self.reduce = {stage: ends[-1][1] for stage, ends in self.reduces.items()}
        self.turn, self.after, self.backward, self.late = [], [], [], []
        for stage, counts in enumerate(ways):
            needed = counts if stage >= first_backward else Counter[Way]()
            seconds = {way: [costs.of(kind)[stage] for kind in way] for way in needed}
            rests = {way: sum(parts[1:]) for way, parts in seconds.items()}
            self.turn.append(min((parts[0] for parts in seconds.values()), default=0.0))
            self.after.append(min(rests.values(), default=0.0))
            self.backward.append(sum(count * sum(seconds[way]) for way, count in needed.items()))
            left = sorted((rests[way] for way in needed.elements()), reverse=True)
            self.late.append(sum(left[: self.places[stage]]))

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

    def in_places(self, stage: int, kept: int, away: int, recomputed: int) -> float:
        """The least step, in seconds, in which the slots of `stage` have time for these numbers of sets, and the lanes for its
        copies."""
        places = self.places[stage]
        if places is None:
            return 0.0
        way = self.forward[stage] + self.beyond(stage)
        least = 0.0
        for backward, outside in (
            (self.turn[stage], self.tail(stage)),
            (self.turn[stage] + self.after[stage], 0.0),
        ):
            in_parts = recomputed * (self.recompute[stage] + backward)
            lives = self.parts[stage] * kept * (way + backward) + in_parts
            lives += away * (self.parts[stage] * self.forward[stage] + 2 * self.copy[stage] + backward)
            last = self.copy[stage] + backward if self.parts[stage] == 1 else 0.0  # those of one part may be short
            copies = self.forward[stage] + away * self.copy[stage] + last if away else 0.0
            least = max(least, self.head(stage) + max(lives / places, copies) + outside)
        return least

    def best_of(self, stage: int, number: int, microbatches: int) -> Choice:
        """Of `number` sets that are not recomputed: how many to keep and how many to offload, for the least step."""

        def seconds(away: int) -> float:
            return self.in_places(stage, number - away, away, microbatches - number)

        # Each further offloaded set lowers the bound of slots, if any does, and raises that of copies: the least is where they meet.
        falls = bisect.bisect_left(range(number), True, key=lambda away: seconds(away + 1) >= seconds(away))
        return number - falls, falls

    def end(self) -> float:
        """Seconds from the step's last turn to its end: the rest of that backward, and the REDUCE_GRAD of its stage."""
        if self.first_backward == len(self.after):
            return 0.0
        return self.after[self.first_backward] + self.reduce.get(self.first_backward, 0.0)


def _least_time(links: _Links, microbatches: int, choices: Sequence[Sequence[Choice]]) -> float:
    """The least T for which each stage has a choice of sets that leaves time for all the work and slots for all sets."""
    stages = range(links.first_backward, len(links.stage_ranks))
    # Per stage and choice: the least step for its slots, and how many sets it does not recompute. In a longer step more sets need no R, so
    # there is less work.
    in_places = {
        stage: [
            (links.in_places(stage, kept, away, microbatches - kept - away), kept + away)
            for kept, away in choices[stage]
        ]
        for stage in stages
    }
    least = max((min(seconds for seconds, _ in options) for options in in_places.values()), default=0.0)
    moments = sorted({least, *(seconds for options in in_places.values() for seconds, _ in options if seconds > least)})

    def work(step_seconds: float) -> float:
        kept = {s: max(kept for seconds, kept in in_places[s] if seconds <= step_seconds) for s in stages}
        recomputed = [microbatches - kept[s] if s in kept else 0 for s in range(len(links.stage_ranks))]
        return _bound(links, microbatches, [count * seconds for count, seconds in zip(recomputed, links.recompute)])

    enough = bisect.bisect_left(moments, True, key=lambda moment: work(moment) <= moment)
    return min(max(moment, work(moment)) for moment in moments[max(0, enough - 1) : enough + 1])


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
    for stage, ends in links.reduces.items():
        for share, seconds in ends:
            work = microbatches * links.forward[stage] + share * (links.backward[stage] + recompute[stage])
            back = links.forward[stage] + links.beyond(stage) + share * (links.turn[stage] + links.after[stage])
            least = max(least, links.head(stage) + max(work, back) + seconds)
    for hop in (*links.hop_forward, *links.hop_backward):  # one microbatch's path, and m - 1 more tensors on the link
        least = max(least, way + (microbatches - 1) * hop)
    return least


def proven_gap(step_seconds: float, least_seconds: float) -> float:
    """How much longer a step is than the lower bound, as a fraction of the bound; 0: no order is faster."""
    gap = step_seconds / least_seconds - 1 if least_seconds > 0 else 0.0
    return gap if gap > 1e-9 else 0.0


def proof_of(step_seconds: float, least_seconds: float) -> str:
    """For example `61, proven optimal` or `73, at least 69`."""
    optimal = proven_gap(step_seconds, least_seconds) == 0.0
    return f"{step_seconds:.6g}, {'proven optimal' if optimal else f'at least {least_seconds:.6g}'}"
