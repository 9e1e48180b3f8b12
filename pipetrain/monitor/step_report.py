"""What one step did: as one rank saw it, of all ranks together, what any engine knows of it, and its line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pipetrain.monitor.breakdown import CAUSES, Bubble, RankBreakdown, break_down_replicas, bubble_fraction
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
    """One step of all ranks: what each of them reported, and where its time went. `timelines` has one entry per replica."""

    schedule: Schedule  # of each replica
    of_ranks: tuple[RankReport, ...]
    timelines: tuple[Timeline, ...]
    breakdown: tuple[RankBreakdown, ...]

    def per_rank(self, name: str) -> tuple[Any, ...]:
        """A field of the ranks' reports, of each of them."""
        return tuple(getattr(report, name) for report in self.of_ranks)

    @property
    def step(self) -> int:
        return self.of_ranks[0].step

    # A number of bytes per rank.
    peak_activation_bytes = property(lambda self: self.per_rank("peak_activation_bytes"))
    peak_memory_bytes = property(lambda self: self.per_rank("peak_memory_bytes"))

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
        own = (where for where in self.per_rank("where") if where.replica == replica)
        return tuple(sorted(own, key=lambda where: where.place))

    def breakdown_of(self, replica: int) -> tuple[RankBreakdown, ...]:
        """Likewise."""
        return tuple(self.breakdown[where.rank] for where in self.ranks_of(replica))

    @staticmethod
    def of(reports: Iterable[RankReport], schedule: Schedule) -> Report:
        """The step of all ranks, which these reports are of."""
        ranks = sorted(reports, key=lambda report: report.rank)
        replicas: dict[int, dict[int, RankReport]] = {}
        for report in ranks:
            replicas.setdefault(report.replica, {})[report.where.place] = report
        timelines = tuple(
            Timeline(len(own), tuple(event for place in sorted(own) for event in own[place].events))
            for _, own in sorted(replicas.items())
        )
        parts = break_down_replicas(schedule, timelines)
        breakdown = (replace(parts[one.replica][one.where.place], rank=one.rank) for one in ranks)
        return Report(schedule, tuple(ranks), timelines, tuple(breakdown))


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

    @staticmethod
    def of(ops: Report) -> StepFigures:
        return StepFigures(ops.step_seconds, ops.per_rank("peak_memory_bytes"), ops)


PerRank = tuple[float | None, ...]

# A line of metrics.jsonl ---------------------------------------------------------------------------------------------

# Figures per rank that have the same name here: in the report of a rank, and in its breakdown.
_OF_REPORT = ("peak_activation_bytes", "peak_reserved_bytes", "communicator_bytes")
_OF_BREAKDOWN = (*CAUSES, "recompute_hidden_seconds", "recompute_exposed_seconds")


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Bubble[PerRank]):
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
    peak_activation_bytes: tuple[int | None, ...]
    peak_memory_bytes: tuple[int | None, ...]
    peak_reserved_bytes: tuple[int | None, ...]
    communicator_bytes: tuple[int | None, ...]
    skipped: bool = False  # whether the step was left out: the weights did not change
    phase: int | None = None  # its phase, from 0; None: the run has none


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
    ops = figures.ops
    of_ranks: dict[str, PerRank] = dict.fromkeys((*_OF_REPORT, *_OF_BREAKDOWN), (None,) * figures.num_ranks)
    if ops is not None:
        of_ranks = {name: ops.per_rank(name) for name in _OF_REPORT}
        of_ranks |= {name: tuple(getattr(rank, name) for rank in ops.breakdown) for name in _OF_BREAKDOWN}
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
        peak_memory_bytes=figures.peak_memory_bytes,
        skipped=not result.is_accepted,
        phase=phase,
        **of_ranks,  # type: ignore[arg-type]
    )
