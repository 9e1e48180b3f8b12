"""What one step did: as one rank saw it, of all ranks together, what any engine knows of it, and its line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from pipetrain.monitor.breakdown import RankBreakdown, break_down_replicas, bubble_fraction
from pipetrain.plan.mesh import RankPlace
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule


@dataclass(frozen=True)
class RankReport:
    """One rank's last step. Bytes are of this rank's device; times in the events are seconds on rank 0's clock, wrong by
    `clock_error_seconds` at most: of the ranks' clocks, and of the device's beside its host's.

    `rank` is that of the run; `place` counts the ranks of its replica, as events and plans do (None: as `rank`), and `stages` are
    those that live there.

    `peak_memory_bytes` are in use by tensors, `peak_reserved_bytes` taken from the device for them, `communicator_bytes` what
    connecting to the neighbouring stages took besides; None where a device does not tell.
    """

    rank: int
    step: int
    events: tuple[OpEvent, ...]
    peak_activation_bytes: int
    peak_activation_bytes_never: int
    peak_memory_bytes: int | None
    clock_error_seconds: float = 0.0
    peak_reserved_bytes: int | None = None
    communicator_bytes: int | None = None
    peak_stage_bytes: int = 0  # of `peak_activation_bytes`, those of stages: without messages on their way
    # Of one microbatch, the most of any stage: its set, and what is held before its R, the stage's input and the outputs kept for R.
    set_bytes: int = 0
    input_bytes: int = 0
    kept_bytes: int = 0
    host_bytes: int = 0  # of the host's memory, reserved for offloaded sets
    limit_bytes: int | None = None  # what the device has; None: it does not tell
    replica: int = 0
    place: int | None = None
    stages: tuple[int, ...] = ()

    @property
    def where(self) -> RankPlace:
        return RankPlace(self.rank, self.replica, self.rank if self.place is None else self.place, self.stages)

    def to_json(self) -> bytes:
        events = [
            (one.lane.value, str(one.op), one.start, one.end, one.ran_seconds, one.waited_seconds, one.stalled_seconds)
            for one in self.events
        ]
        return json.dumps({**self.__dict__, "events": events}).encode()

    @staticmethod
    def from_json(text: bytes) -> RankReport:
        record = json.loads(text)
        place = record["rank"] if record["place"] is None else record["place"]
        events = [OpEvent(place, Lane(lane), Op.parse(op), *times) for lane, op, *times in record["events"]]
        return RankReport(**{**record, "events": tuple(events), "stages": tuple(record["stages"])})


@dataclass(frozen=True)
class Report:
    """One step of all ranks; lists have one entry per rank, `timelines` one per replica."""

    step: int
    schedule: Schedule  # of each replica
    timelines: tuple[Timeline, ...]
    ranks: tuple[RankPlace, ...]
    breakdown: tuple[RankBreakdown, ...]
    peak_activation_bytes: tuple[int, ...]
    peak_activation_bytes_never: tuple[int, ...]
    peak_memory_bytes: tuple[int | None, ...]
    peak_reserved_bytes: tuple[int | None, ...]
    communicator_bytes: tuple[int | None, ...]
    clock_error_seconds: float
    peak_stage_bytes: tuple[int, ...] = ()
    set_bytes: tuple[int, ...] = ()  # of one microbatch, the most of any stage of the rank
    input_bytes: tuple[int, ...] = ()
    kept_bytes: tuple[int, ...] = ()
    host_bytes: tuple[int, ...] = ()
    limit_bytes: tuple[int | None, ...] = ()  # what the rank's device has

    @property
    def timeline(self) -> Timeline:
        """That of the first replica."""
        return self.timelines[0]

    @property
    def step_seconds(self) -> float:
        """From the start of the first F, R or B of any rank to the end of the last, or of the last REDUCE_GRAD."""
        return max(one.end for one in self.timelines) - self.start

    @property
    def start(self) -> float:
        """When the first F, R or B of any rank started."""
        return min(one.start for one in self.timelines)

    def ranks_of(self, replica: int) -> tuple[RankPlace, ...]:
        """Those of one replica, as its timeline counts them."""
        own = (where for where in self.ranks if where.replica == replica)
        return tuple(sorted(own, key=lambda where: where.place))

    def breakdown_of(self, replica: int) -> tuple[RankBreakdown, ...]:
        """Likewise."""
        return tuple(self.breakdown[where.rank] for where in self.ranks_of(replica))

    @staticmethod
    def of(reports: Iterable[RankReport], schedule: Schedule) -> Report:
        """The step of all ranks, which these reports are of."""
        ranks = sorted(reports, key=lambda report: report.rank)
        places = tuple(report.where for report in ranks)
        replicas: dict[int, dict[int, RankReport]] = {}
        for report in ranks:
            replicas.setdefault(report.replica, {})[report.where.place] = report
        timelines = tuple(
            Timeline(len(own), tuple(event for place in sorted(own) for event in own[place].events))
            for _, own in sorted(replicas.items())
        )
        parts = break_down_replicas(schedule, timelines)
        return Report(
            step=ranks[0].step,
            schedule=schedule,
            timelines=timelines,
            ranks=places,
            breakdown=tuple(replace(parts[where.replica][where.place], rank=where.rank) for where in places),
            clock_error_seconds=max(report.clock_error_seconds for report in ranks),
            **{name: tuple(getattr(report, name) for report in ranks) for name in _BYTES},
        )


# Fields of a rank's report that the report of all has under the same name, per rank.
_BYTES = tuple(field.name for field in fields(Report) if "_bytes" in field.name)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: the same on every rank. Loss and norm may be not finite where the step was refused."""

    loss: float  # mean over the batch, in nats per token
    learning_rate: float
    grad_norm: float | None  # global, before clipping; None where it is not known
    is_accepted: bool = True  # whether the weights have changed


@dataclass(frozen=True)
class StepFigures:
    """What an engine knows of its last step on all ranks; bytes have one entry per rank. None: of a step that was not reported."""

    step_seconds: float | None  # from the start of the first F to the end of the last B
    peak_memory_bytes: tuple[int | None, ...]
    ops: Report | None = None  # what ran when; None: the engine does not tell

    @property
    def num_ranks(self) -> int:
        return len(self.peak_memory_bytes)


PerRank = tuple[float | None, ...]

# A line of metrics.jsonl ---------------------------------------------------------------------------------------------

_OF_REPORT = ("peak_activation_bytes", "peak_reserved_bytes", "communicator_bytes")


@dataclass(frozen=True)
class StepMetrics:
    """One step. None: does not apply, or was not reported for this step. Tuples: a number per rank, in rank order. Seconds, bytes."""

    step: int  # from 1
    loss: float | None  # nats per token that counts; None: not finite
    perplexity: float | None  # e to the loss; None: not finite
    lr: float
    grad_norm: float | None  # before clipping; None: not finite, or not known
    tokens: int  # of the batch, with padding and all else that does not count
    counted_tokens: int  # those that the loss is a mean over
    tokens_seen: int  # by all steps so far that changed the weights
    tokens_per_second: float  # `tokens` over the whole step, with the optimizer and everything else
    step_seconds: float | None  # from the start of the first op to the end of the last one on any rank
    bubble_fraction: float | None
    mfu: float | None
    recompute_hidden_seconds: PerRank
    recompute_exposed_seconds: PerRank
    wait_activation_seconds: PerRank
    wait_gradient_seconds: PerRank
    fill_seconds: PerRank
    drain_seconds: PerRank
    imbalance_seconds: PerRank
    unexplained_seconds: PerRank
    peak_activation_bytes: tuple[int | None, ...]
    peak_memory_bytes: tuple[int | None, ...]
    peak_reserved_bytes: tuple[int | None, ...]
    communicator_bytes: tuple[int | None, ...]
    reduce_exposed_seconds: PerRank = ()
    host_seconds: PerRank = ()
    handover_seconds: PerRank = ()
    machine_seconds: PerRank = ()
    wait_copy_seconds: PerRank = ()
    skipped: bool = False  # whether the step was left out: the weights did not change
    phase: int | None = None  # its phase, from 0; None: the run has none


# Figures per rank that have the same name in the breakdown of a rank, and in a line of metrics.jsonl.
_OF_BREAKDOWN = {field.name for field in fields(RankBreakdown)} & {field.name for field in fields(StepMetrics)}


def perplexity_of(loss: float | None) -> float | None:
    """e to a loss in nats per token; None where that is no number."""
    try:
        return math.exp(loss) if loss is not None and math.isfinite(loss) else None
    except OverflowError:
        return None


def metrics_of(
    step: int,
    result: StepResult,
    figures: StepFigures,
    tokens: tuple[int, int],
    tokens_seen: int,
    seconds: float,
    mfu_of_a_token_per_second: float | None = None,
    phase: int | None = None,
) -> StepMetrics:
    """The line of `step` in metrics.jsonl; what is not finite or not known is None. `tokens`: all, and those that count; `seconds`: of the
    whole step."""
    ops, unknown = figures.ops, (None,) * figures.num_ranks

    def of_breakdown(name: str) -> PerRank:
        return unknown if ops is None else tuple(getattr(rank, name) for rank in ops.breakdown)

    of_ranks: dict[str, Any] = {name: getattr(ops, name, unknown) for name in _OF_REPORT}
    of_ranks |= {name: of_breakdown(name) for name in _OF_BREAKDOWN}
    return StepMetrics(
        step=step,
        loss=result.loss if math.isfinite(result.loss) else None,
        perplexity=perplexity_of(result.loss),
        lr=result.learning_rate,
        grad_norm=result.grad_norm if result.grad_norm is not None and math.isfinite(result.grad_norm) else None,
        tokens=tokens[0],
        counted_tokens=tokens[1],
        tokens_seen=tokens_seen,
        tokens_per_second=tokens[0] / seconds,
        step_seconds=figures.step_seconds,
        bubble_fraction=None if ops is None else bubble_fraction(ops.breakdown),
        mfu=None if mfu_of_a_token_per_second is None else tokens[0] / seconds * mfu_of_a_token_per_second,
        unexplained_seconds=of_breakdown("other_seconds"),
        peak_memory_bytes=figures.peak_memory_bytes,
        skipped=not result.is_accepted,
        phase=phase,
        **of_ranks,
    )
