"""The figures of a step: a line of metrics.jsonl."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipetrain.monitor.breakdown import bubble_fraction
from pipetrain.monitor.step_report import StepFigures, StepResult

PerRank = tuple[float | None, ...]

# What stands in the figures per rank under the same name: in the breakdown of a rank, and in the report of all.
_OF_BREAKDOWN = (
    *("recompute_hidden_seconds", "recompute_exposed_seconds", "wait_activation_seconds", "wait_gradient_seconds"),
    *("fill_seconds", "drain_seconds", "imbalance_seconds", "reduce_exposed_seconds"),
)
_OF_REPORT = ("peak_activation_bytes", "peak_reserved_bytes", "communicator_bytes")


@dataclass(frozen=True)
class StepMetrics:
    """One step. None: does not apply. Tuples: a number per rank, in rank order. Seconds, bytes."""

    step: int  # from 1
    loss: float | None  # nats per token that counts; None: not finite
    perplexity: float | None  # e to the loss; None: not finite
    lr: float
    grad_norm: float | None  # before clipping; None: not finite, or not known
    tokens: int  # of the batch, with padding and all else that does not count
    counted_tokens: int  # those that the loss is a mean over
    tokens_seen: int  # by all steps so far that changed the weights
    tokens_per_second: float  # `tokens` over the whole step, with the optimizer and everything else
    step_seconds: float  # from the start of the first op to the end of the last one on any rank
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
