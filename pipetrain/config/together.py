"""Checks the values of a configuration: each within its range, and keys that must fit each other.

`records.py` has the range of each field; `RecomputePolicy` has those of `recompute`. Model, data, plan, schedule and engine check their
own needs when they are made.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipetrain.config.phases import phases_of, steps_of_phases
from pipetrain.config.problem import ConfigError, shown
from pipetrain.config.records import HUGGING_FACE, PYTHON, WEIGHTS_IN, RunConfig
from pipetrain.config.schema import check_limits
from pipetrain.schedule.policy import RecomputePolicy


def check_schedule(config: RunConfig) -> None:
    """Checks the keys from which a schedule is made and simulated: `pipeline`, `recompute`, `transport`, `cluster` and `cost`.

    Raises:
        ConfigError: a value out of range, or one that is not supported.
    """
    for group in ("pipeline", "transport", "cluster", "cost"):
        check_limits(getattr(config, group), f"{group}.")
    try:
        RecomputePolicy(**vars(config.recompute))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.pipeline.num_stages and config.pipeline.num_stages % config.pipeline.stages_per_rank:
        raise ConfigError(
            f"pipeline.num_stages={config.pipeline.num_stages} cannot be spread over ranks with "
            f"pipeline.stages_per_rank={config.pipeline.stages_per_rank} each: "
            "pipeline.num_stages must be a multiple of it"
        )


def check_run(config: RunConfig) -> None:
    """Checks every key of a training run.

    Raises:
        ConfigError: a value out of range, one that is not supported, or keys that do not fit each other.
    """
    check_schedule(config)
    in_parts = config.recompute.segments != 1  # which layers make a part depends on their bytes
    by_profile = "auto" in (config.pipeline.schedule, config.pipeline.balance) or in_parts
    if config.plan.profile is not None and not by_profile:
        raise ConfigError(
            f"plan.profile={config.plan.profile}: pipeline.schedule={config.pipeline.schedule} and the given pipeline.balance do not use measured "
            "times; use `auto` for one of them, or leave plan.profile out (`pipetrain show` draws any schedule with it)"
        )
    if config.plan.cluster is not None or config.plan.tensor != 1:
        raise ConfigError(
            f"plan.cluster={shown(config.plan.cluster)} plan.tensor={config.plan.tensor}: `pipetrain plan` alone reads plan.cluster, and "
            "plan.tensor with it; leave both out"
        )
    if config.pipeline.schedule == "auto" and config.pipeline.search_seconds >= config.timeout_seconds:
        raise ConfigError(
            f"pipeline.search_seconds={config.pipeline.search_seconds}: the other ranks wait timeout_seconds="
            f"{config.timeout_seconds} at most; search for less, or wait longer"
        )
    if config.pipeline.schedule == "inference":
        raise ConfigError(
            "pipeline.schedule=inference: it has no backward, so nothing is trained; use pipeline.schedule=gpipe"
        )
    check_limits(config)
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(
            f"steps={config.steps} epochs={config.epochs:g}: both set the length of the run; give one, and type steps=null or epochs=null for the other"
        )
    phases_of(config)
    if (
        config.data.name == PYTHON
        and config.model.name not in (PYTHON, HUGGING_FACE)
        and config.model.vocab_size is None
    ):
        raise ConfigError(
            f"model.vocab_size is not set: data=python does not say how many tokens there are, and model={config.model.name} has to know; "
            "type model.vocab_size=32000, with your number"
        )
    if config.model.dtype not in (None, "auto", WEIGHTS_IN[config.precision]):
        raise ConfigError(
            f"model.dtype={config.model.dtype}: precision={config.precision} trains {WEIGHTS_IN[config.precision]} weights; leave "
            "model.dtype out, and set precision=bf16-true for bfloat16 weights"
        )
    _check_snapshots(config)
    if config.pipeline.num_microbatches > config.data.global_batch_size:
        raise ConfigError(
            f"pipeline.num_microbatches={config.pipeline.num_microbatches} is more than "
            f"data.global_batch_size={config.data.global_batch_size}: each microbatch needs a sample; use "
            f"pipeline.num_microbatches={config.data.global_batch_size} or less, or a larger data.global_batch_size"
        )


def check_samples(config: RunConfig, num_replicas: int) -> None:
    """Checks that each microbatch of each replica gets a sample.

    Raises:
        ConfigError: one gets none.
    """
    batch_size, num_microbatches = config.data.global_batch_size, config.pipeline.num_microbatches
    if batch_size < num_replicas * num_microbatches:
        fitting = batch_size // num_replicas
        fewer = f"pipeline.num_microbatches={fitting} or less" if fitting else f"{batch_size} replicas or less"
        raise ConfigError(
            f"data.global_batch_size={batch_size} is less than parallel.num_replicas={num_replicas} x "
            f"pipeline.num_microbatches={num_microbatches} = {num_replicas * num_microbatches}: each microbatch of each replica needs "
            f"a sample; use {fewer}, or data.global_batch_size={num_replicas * num_microbatches} or more"
        )


def with_steps(config: RunConfig, *samples_per_epoch: int) -> RunConfig:
    """The configuration with its number of steps, now that the data is known: `epochs` passes through it, rounded up to whole steps.

    `samples_per_epoch` has a number for each phase. A phase that ends early counts as its share of an epoch.

    Raises:
        ConfigError: a phase would not begin.
    """
    if config.epochs is None:
        return replace(config, steps=config.num_steps)
    left, phases = config.epochs, phases_of(config)
    for (phase, num_steps), samples in zip(steps_of_phases(phases, phases[-1].first_step - 1), samples_per_epoch):
        batch_size = phase.config.data.global_batch_size
        if phase is phases[-1] or left * samples <= num_steps * batch_size:
            steps = phase.first_step - 1 + max(math.ceil(left * samples / batch_size), 1)
            break
        left -= num_steps * batch_size / samples
    known = replace(config, steps=steps, epochs=None)
    phases_of(known)
    return known


def _check_snapshots(config: RunConfig) -> None:
    """Checks that keys which need regular snapshots have them."""
    if config.snapshot.every_steps is not None:
        return
    set_it = "set snapshot.every_steps, as in snapshot.every_steps=100"
    for key, value in (("guard.not_finite", config.guard.not_finite), ("guard.spike", config.guard.spike)):
        if value == "rollback" and config.snapshot.every_minutes is None:
            raise ConfigError(f"{key}=rollback: returns to the newest snapshot, and the run would have none; {set_it}")
    if (keep := config.snapshot.keep_every) is not None:
        raise ConfigError(
            f"snapshot.keep_every={keep}: keeps some of the regular snapshots, and the run has none; {set_it}"
        )
