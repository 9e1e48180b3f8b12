"""From what the steps did to what the run reports: the figures of a step, and of all of them beside the prediction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from pipetrain.observe.metrics import StepMetrics
from pipetrain.observe.report import RunReport, perplexity_of
from pipetrain.plan.measured import FIRST_COMPARED_STEP, MEASURED_STEPS, measure_costs
from pipetrain.plan.plan import Plan
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.schedule import Schedule
from pipetrain.timeline.breakdown import bubble_fraction
from pipetrain.timeline.shown import Shown, show_schedule
from pipetrain.timeline.step_report import Report, StepFigures, StepResult


@dataclass(frozen=True)
class TokenFigures:
    """The tokens of a step, as in `StepMetrics`."""

    tokens: int
    counted_tokens: int
    tokens_seen: int
    tokens_per_second: float


def measured_steps(first_step: int) -> range:
    """The steps of a run that begins with `first_step` whose op times the prediction is made from."""
    return range(first_step - 1 + MEASURED_STEPS.start, first_step - 1 + MEASURED_STEPS.stop)


def metrics_of(
    step: int,
    result: StepResult,
    figures: StepFigures,
    tokens: TokenFigures,
    mfu_of_a_token_per_second: float | None = None,
    phase: int | None = None,
) -> StepMetrics:
    """The line of `step` in metrics.jsonl; what is not finite or not known is None."""
    ops, unknown = figures.ops, (None,) * figures.num_ranks

    def per_rank(name: str) -> tuple[float | None, ...]:
        return unknown if ops is None else tuple(getattr(rank, name) for rank in ops.breakdown)

    return StepMetrics(
        step=step,
        loss=result.loss if math.isfinite(result.loss) else None,
        perplexity=perplexity_of(result.loss),
        lr=result.learning_rate,
        grad_norm=result.grad_norm if result.grad_norm is not None and math.isfinite(result.grad_norm) else None,
        **asdict(tokens),
        step_seconds=figures.step_seconds,
        bubble_fraction=None if ops is None else bubble_fraction(ops.breakdown),
        mfu=None if mfu_of_a_token_per_second is None else tokens.tokens_per_second * mfu_of_a_token_per_second,
        recompute_hidden_seconds=per_rank("recompute_hidden_seconds"),
        recompute_exposed_seconds=per_rank("recompute_exposed_seconds"),
        wait_activation_seconds=per_rank("wait_activation_seconds"),
        wait_gradient_seconds=per_rank("wait_gradient_seconds"),
        fill_seconds=per_rank("fill_seconds"),
        drain_seconds=per_rank("drain_seconds"),
        imbalance_seconds=per_rank("imbalance_seconds"),
        reduce_exposed_seconds=per_rank("reduce_exposed_seconds"),
        unexplained_seconds=per_rank("other_seconds"),
        peak_activation_bytes=unknown if ops is None else ops.peak_activation_bytes,
        peak_memory_bytes=figures.peak_memory_bytes,
        peak_reserved_bytes=unknown if ops is None else ops.peak_reserved_bytes,
        communicator_bytes=unknown if ops is None else ops.communicator_bytes,
        skipped=not result.is_accepted,
        phase=phase,
    )


def measured_and_predicted(
    schedule: Schedule, last: Report | None, early: Sequence[Sequence[Timeline]]
) -> tuple[tuple[Shown, ...], Shown | None]:
    """The last step on each replica, and the step that the op times of `early` steps predict; neither where nobody tells of ops."""
    if last is None:
        return (), None
    predicted = show_schedule(schedule, measure_costs(schedule.num_stages, early)) if early else None
    several = len(last.timelines) > 1

    def shown(number: int, timeline: Timeline) -> Shown:
        # Its own, not those of other steps: it may have been faster.
        costs = measure_costs(schedule.num_stages, [last.timelines], replica=number)
        return Shown(
            last.schedule,  # in the last step microbatches that count nothing may have been skipped
            costs,
            timeline,
            # The step itself is an order of its ops: what their medians say of the least time can be no more.
            min(bound_of(last.schedule, costs), last.step_seconds),
            last.breakdown_of(number),
            ranks=last.ranks_of(number) if several else (),
            span=(last.start, last.start + last.step_seconds) if several else None,
        )

    return tuple(shown(number, timeline) for number, timeline in enumerate(last.timelines)), predicted


def make_report(
    experiment: str,
    plan: Plan,
    schedule: Schedule,
    metrics: Sequence[StepMetrics],
    last: StepFigures,
    *,
    first_step: int,
    predicted: Shown | None,
    heldout_loss: float | None,
    stopped_by: str | None,
) -> RunReport:
    """The report of the run: medians over the steps that were predicted (all, where there are too few), peaks of all.

    A run that goes on reports the steps since then, from `first_step`: before, it may have had another number of ranks. Likewise those of a
    phase.
    """
    compared = [step for step in metrics if step.step >= first_step - 1 + FIRST_COMPARED_STEP]
    settled = compared or metrics

    def median(name: str) -> float | None:
        return _known(statistics.median, [getattr(step, name) for step in settled])

    def medians(name: str) -> tuple[float | None, ...]:
        return tuple(_known(statistics.median, values) for values in zip(*(getattr(step, name) for step in settled)))

    return RunReport(
        experiment=experiment,
        schedule=schedule.family,
        recompute_mode=schedule.policy.mode.value,
        balance=plan.balance,
        steps=metrics[-1].step,
        loss=metrics[-1].loss,
        heldout_loss=heldout_loss,
        perplexity=perplexity_of(metrics[-1].loss),
        heldout_perplexity=perplexity_of(heldout_loss),
        tokens_per_second=median("tokens_per_second"),
        step_seconds_measured=median("step_seconds"),
        step_seconds_predicted=predicted.step_seconds if predicted and compared else None,
        bubble_fraction=median("bubble_fraction"),
        stopped_by=stopped_by,
        recompute_hidden_seconds=medians("recompute_hidden_seconds"),
        recompute_exposed_seconds=medians("recompute_exposed_seconds"),
        peak_activation_bytes=peak_activation_bytes(metrics),
        peak_activation_bytes_never=last.ops.peak_activation_bytes_never if last.ops else (None,) * last.num_ranks,
        mfu=median("mfu"),
        set_bytes=last.ops.set_bytes if last.ops else (),
        input_bytes=last.ops.input_bytes if last.ops else (),
        kept_bytes=last.ops.kept_bytes if last.ops else (),
        deferred_share=tuple(rank.deferred_share for rank in last.ops.breakdown) if last.ops else (),
    )


def peak_activation_bytes(metrics: Sequence[StepMetrics]) -> tuple[float | None, ...]:
    """The most that each rank held in any of these steps."""
    return tuple(_known(max, values) for values in zip(*(step.peak_activation_bytes for step in metrics)))


def _known(sum_up: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """`sum_up` of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum_up(known) if known else None
