"""Everything there is to know about a schedule before it runs: what `pipetrain show` draws and prints."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from typing import Any

from pipetrain.monitor.breakdown import RankBreakdown, break_down, bubble_fraction, bytes_over_time, exposed_intervals
from pipetrain.monitor.draw.table import count_of, number
from pipetrain.plan.mesh import RankPlace
from pipetrain.schedule.alive import OPENS_STASH, ends_stash
from pipetrain.schedule.bound import bound_of, proof_of, proven_gap
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.families import ALWAYS_SPLIT
from pipetrain.schedule.halves import is_split
from pipetrain.schedule.kinds import COPY_LANES
from pipetrain.schedule.op import Lane
from pipetrain.schedule.placement import spelling_of
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy, Sets
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate


@dataclass(frozen=True)
class Shown:
    """A schedule with its simulated step. Times in seconds."""

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    bound_seconds: float
    breakdown: tuple[RankBreakdown, ...]
    least_seconds: float | None = None  # after a search for the order: no order is faster, as far as proven
    # If it is the step of one replica of several: its ranks in the run, by place, and start and end over all replicas.
    ranks: tuple[RankPlace, ...] = ()
    span: tuple[float, float] | None = None

    @property
    def proof(self) -> str | None:
        """The sentence of `proof_of`; None: the order is not the result of a search."""
        return None if self.least_seconds is None else proof_of(self.step_seconds, self.least_seconds)

    @property
    def start(self) -> float:
        return self.timeline.start if self.span is None else self.span[0]

    @property
    def end(self) -> float:
        return self.timeline.end if self.span is None else self.span[1]

    @property
    def step_seconds(self) -> float:
        return self.end - self.start

    def rank_name(self, place: int) -> str:
        """What the rank at this place is called in a picture."""
        return f"rank {self.ranks[place].rank if self.ranks else place}"

    @property
    def bubble_fraction(self) -> float:
        return bubble_fraction(self.breakdown)

    @property
    def hidden_seconds(self) -> float:
        """Recomputation that was hidden, of all ranks."""
        return sum(rank.recompute_hidden_seconds for rank in self.breakdown)

    @property
    def exposed_seconds(self) -> float:
        """That which was exposed."""
        return sum(rank.recompute_exposed_seconds for rank in self.breakdown)

    @property
    def title(self) -> str:
        return title_of(self.schedule)

    @property
    def facts(self) -> str:
        """Step, bound, bubble and where recomputation went, in a few words each."""
        facts = [f"step {number(self.step_seconds)} s", f"bound {number(self.bound_seconds)} s"]
        facts.append(f"bubble {self.bubble_fraction:.0%}")
        if (recompute := self.hidden_seconds + self.exposed_seconds) > 0:
            facts.append(f"recompute hidden {number(self.hidden_seconds)} of {number(recompute)} s")
        if reducing := max(rank.reduce_exposed_seconds for rank in self.breakdown):
            facts.append(f"reduce exposed {number(reducing)} s")
        sets = " ".join(f"{rank.peak_sets:.3g}" for rank in self.breakdown)
        return "  ·  ".join([*facts, f"sets alive per rank {sets}"])

    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per rank the most bytes of sets and stashed inputs at once, if the costs say their size."""
        if not self.costs.set_bytes or not self.costs.input_bytes:
            return None
        events = map(self.timeline.of_rank, range(self.schedule.num_ranks))
        curves = (bytes_over_time(self.schedule, of_rank, self.costs) for of_rank in events)
        return tuple(max((held for _, held in curve), default=0.0) for curve in curves)

    def peak_sets_with_inputs(self) -> tuple[float, ...] | None:
        """Per rank the most sets at once, stashed inputs and kept outputs counted as fractions, if costs have these
        (`input_share`, `kept_share`)."""
        if not self.costs.input_share and not self.costs.kept_share:
            return None
        stages = self.costs.num_stages
        in_sets = dataclasses.replace(
            self.costs,
            input_bytes=self.costs.input_share or (0.0,) * stages,
            kept_bytes=self.costs.kept_share,
            set_bytes=(1.0,) * stages,
        )
        return dataclasses.replace(self, costs=in_sets).peak_bytes()

    def peak_stash(self) -> list[int]:
        """Per rank the most microbatches between F and the end of their backward at once, summed over its stages."""
        peaks = []
        for rank in range(self.schedule.num_ranks):
            ops = [event.op for event in self.timeline.of_rank(rank) if event.op.stage >= self.schedule.first_backward]
            held = itertools.accumulate((op.kind in OPENS_STASH) - ends_stash(op) for op in ops)
            peaks.append(max(held, default=0))
        return peaks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, holder in enumerate(self.schedule.stage_ranks) if holder == rank)

    def exposed(self, rank: int) -> list[tuple[float, float]]:
        """When the recomputation of `rank` kept the next op from running."""
        return exposed_intervals(self.schedule, self.timeline.of_rank(rank))

    def as_json(self) -> dict[str, Any]:
        """Plain lists and numbers, under the names that scripts rely on; per rank means a list in rank order."""
        with_inputs, least = self.peak_sets_with_inputs(), self.least_seconds
        return {
            "step_seconds": self.step_seconds,
            "bound_seconds": self.bound_seconds,
            **({} if least is None else {"proven_gap": proven_gap(self.step_seconds, least)}),
            "bubble_fraction": self.bubble_fraction,
            "recompute_hidden_seconds": [rank.recompute_hidden_seconds for rank in self.breakdown],
            "recompute_exposed_seconds": [rank.recompute_exposed_seconds for rank in self.breakdown],
            "peak_sets": [rank.peak_sets for rank in self.breakdown],
            "peak_stash": self.peak_stash(),
            **({} if with_inputs is None else {"peak_sets_with_inputs": list(with_inputs)}),
            "ops": [op_record(event) for event in self.timeline.events],
        }


def title_of(schedule: Schedule) -> str:
    """For example `gpipe, overlap: 4 stages x 8 microbatches`, `1f1b, split, ...`, or `... 4 stages on 2 ranks, placed v, x 8 microbatches`; with
    replicas, `4 replicas of 2 stages x 8 microbatches`."""
    ranks = "" if schedule.num_ranks == schedule.num_stages else f" on {count_of(schedule.num_ranks, 'rank')}"
    placement = spelling_of(schedule.stage_ranks)
    ranks += "" if placement == "loop" else f", placed {placement},"
    size = (
        f"{count_of(schedule.num_stages, 'stage')}{ranks} x {count_of(schedule.num_microbatches, 'microbatch', 'es')}"
    )
    size = f"{schedule.num_replicas} replicas of {size}" if schedule.num_replicas > 1 else size
    halves = ", split" if is_split(schedule) and schedule.family not in ALWAYS_SPLIT else ""
    return f"{schedule.family}{halves}, {_policy(schedule.policy)}: {size}"


def op_record(event: OpEvent) -> dict[str, Any]:
    """An event as plain values."""
    times = {"start": event.start, "end": event.end}
    return {"rank": event.rank, "lane": event.lane.value, "op": str(event.op), **times}


def chrome_trace(timeline: Timeline) -> str:
    """A timeline in the Chrome trace event format, for ui.perfetto.dev: a process per rank, a thread per lane, a complete event ("ph": "X") per op."""
    used = {event.lane for event in timeline.events}
    lanes = [lane for lane in Lane if lane not in COPY_LANES or lane in used]
    events: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, lane in enumerate(lanes):
            name = {"name": lane.value}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": name})
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": str(event.op),
                "cat": event.op.kind.value,
                "pid": event.rank,
                "tid": lanes.index(event.lane),
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"stage": event.op.stage, "microbatch": event.op.microbatch},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _policy(policy: RecomputePolicy) -> str:
    """The mode, and what differs from the default."""
    recomputes = policy.mode is not Mode.NEVER
    words = {
        policy.mode.value: True,
        f"segments {policy.segments}": policy.in_parts,
        f"sets {_numbers(policy.sets)}": recomputes and policy.sets not in ((None,) if policy.in_parts else (None, 1)),
        f"keep {policy.keep}": recomputes and policy.keep is not None,
        f"selective {' '.join(map(str, policy.selective))}": recomputes and policy.selective,
        f"offload {policy.offload}": policy.offloads,
        f"stash {_numbers(policy.stash)}": policy.stash is not None,
        "last stage too": recomputes and policy.last_stage is LastStage.ALWAYS,
    }
    return ", ".join(text for text, is_said in words.items() if is_said)


def _numbers(value: Sets | None) -> str:
    return "-".join(f"{number:g}" for number in (value if isinstance(value, tuple) else (value,)) if number is not None)


def show_schedule(schedule: Schedule, costs: Costs | None = None, least_seconds: float | None = None) -> Shown:
    """Checks and simulates a schedule; `costs` default to F 1, B 2, R 1 and no hop. `least_seconds`: proven of any order.

    Raises:
        ValueError: as `check` and `simulate` do.
    """
    check(schedule)
    known = costs or Costs.spread(schedule.num_stages)
    timeline = simulate(schedule, known)
    return Shown(schedule, known, timeline, bound_of(schedule, known), break_down(schedule, timeline), least_seconds)
