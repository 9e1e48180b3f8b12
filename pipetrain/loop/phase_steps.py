"""One phase of a run, as its steps need it: what they run by, and what they leave for its report. A run without phases is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipetrain.config.records import RunConfig
from pipetrain.data.batch import Batch, Share
from pipetrain.plan.plan import Plan
from pipetrain.schedule.schedule import Schedule
from pipetrain.timeline.step_report import StepFigures
from pipetrain.timeline.stragglers import StragglerWatch


@dataclass
class PhaseSteps:
    """Steps `first_step` to `last_step` of a run; every rank has one for each phase."""

    number: int | None  # from 0; None: the run has no phases
    first_step: int
    last_step: int
    config: RunConfig
    plan: Plan
    schedule: Schedule
    heldout: Iterable[Batch]
    share: Share | None  # of a batch, that is this replica's; None: all of it
    mfu_of_a_token_per_second: float | None  # None: what the model does, or a device can do, is not known
    watch: StragglerWatch
    last: StepFigures | None = None  # of its last step so far, on rank 0


def phase_of(phases: Sequence[PhaseSteps], step: int) -> PhaseSteps:
    """The phase of `step`; past the end of the run the last one."""
    return next(phase for phase in reversed(phases) if phase.first_step <= step)
