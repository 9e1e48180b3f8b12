"""What a step did, as one rank saw it, and of all ranks together."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from pipetrain.runtime.chain import Clock
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.breakdown import RankBreakdown, break_down
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.schedule import Schedule


@dataclass(frozen=True)
class RankReport:
    """One rank's last step. Bytes are of this rank's device; times in the events are seconds on rank 0's clock, which this
    rank knows to within `clock_error_seconds`."""

    rank: int
    step: int
    events: tuple[OpEvent, ...]
    peak_activation_bytes: int
    peak_activation_bytes_never: int
    peak_memory_bytes: int | None
    clock_error_seconds: float = 0.0

    def to_json(self) -> bytes:
        events = [(event.lane.value, str(event.op), event.start, event.end) for event in self.events]
        return json.dumps({**self.__dict__, "events": events}).encode()

    @staticmethod
    def from_json(text: bytes) -> RankReport:
        record = json.loads(text)
        rank = record["rank"]
        events = [OpEvent(rank, Lane(lane), Op.parse(op), start, end) for lane, op, start, end in record["events"]]
        return RankReport(**{**record, "events": tuple(events)})


@dataclass(frozen=True)
class Report:
    """One step of all ranks; lists have one entry per rank."""

    step: int
    schedule: Schedule
    timeline: Timeline
    breakdown: tuple[RankBreakdown, ...]
    peak_activation_bytes: tuple[int, ...]
    peak_activation_bytes_never: tuple[int, ...]
    peak_memory_bytes: tuple[int | None, ...]
    clock_error_seconds: float

    @property
    def step_seconds(self) -> float:
        """From the start of the first F, R or B of any rank to the end of the last."""
        return self.timeline.step_seconds

    @staticmethod
    def of(reports: Iterable[RankReport], schedule: Schedule) -> Report:
        ranks = sorted(reports, key=lambda report: report.rank)
        timeline = Timeline(len(ranks), tuple(event for report in ranks for event in report.events))
        return Report(
            step=ranks[0].step,
            schedule=schedule,
            timeline=timeline,
            breakdown=break_down(schedule, timeline),
            peak_activation_bytes=tuple(report.peak_activation_bytes for report in ranks),
            peak_activation_bytes_never=tuple(report.peak_activation_bytes_never for report in ranks),
            peak_memory_bytes=tuple(report.peak_memory_bytes for report in ranks),
            clock_error_seconds=max(report.clock_error_seconds for report in ranks),
        )


def measure_rank(
    rank: int,
    step: int,
    events: Iterable[OpEvent],
    clock: Clock,
    stages: Mapping[int, Stage],
    peak_bytes: int,
    device: torch.device,
) -> RankReport:
    shift = clock.offset_seconds
    on_clock_0 = tuple(replace(event, start=event.start + shift, end=event.end + shift) for event in events)
    never = activation_bytes_of_never(on_clock_0, stages)
    return RankReport(rank, step, on_clock_0, peak_bytes, never, peak_memory_bytes(device), clock.error_seconds)


def activation_bytes_of_never(events: Iterable[OpEvent], stages: Mapping[int, Stage]) -> int:
    """What the rank would hold at its peak if every set stayed from F to B, in the order in which F and B ran.

    From the bytes of each set as R or F brought it, and of each stashed input.
    """
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start):
        op = event.op
        if op.kind not in (Kind.F, Kind.B) or op.stage not in stages:
            continue
        stage = stages[op.stage]
        size = stage.set_bytes.get(op.microbatch or 0, 0) + stage.stash_bytes.get(op.microbatch or 0, 0)
        alive += size if op.kind is Kind.F else -size
        peak = max(peak, alive)
    return peak


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory that this process had: of its device, and on the CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
