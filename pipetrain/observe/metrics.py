"""The figures of a step."""

from __future__ import annotations

from dataclasses import dataclass

PerRank = tuple[float | None, ...]


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
