"""Whether the values of a configuration make a run: each within its range, and keys that must fit each other.

A range stands beside its field in `records.py`, and those of `recompute` in the policy that is made of it. What model, data, plan and
schedule need for themselves is checked where those are made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipetrain.config.phases import phases_of, steps_of_phases
from pipetrain.config.problem import ConfigError, shown
from pipetrain.config.records import ADAMW, DEEPSPEED, HUGGING_FACE, WEIGHTS_IN, RunConfig, TransportConfig
from pipetrain.config.schema import check_limits
from pipetrain.schedule.policy import RecomputePolicy

_COMMAND = "use engine=deepspeed pipeline=1f1b recompute=inline, or engine=native"
# The values of keys that engine=deepspeed takes, and what it does with others.
_DEEPSPEED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "pipeline.schedule": (("1f1b",), f"runs 1F1B alone; {_COMMAND}"),
    "pipeline.stages_per_rank": ((1,), "has one stage per rank; use pipeline.stages_per_rank=1"),
    "pipeline.placement": (("loop",), "holds stage s on rank s; use pipeline.placement=loop"),
    "pipeline.split_backward": ((False,), "runs each B as a whole; use pipeline.split_backward=false"),
    "pipeline.warmup": ((None,), "fills the pipeline as 1F1B does; use pipeline.warmup=null"),
    **{
        f"transport.{key}": ((value,), "sends messages in its own way; use transport=auto")
        for key, value in vars(TransportConfig()).items()
    },
    "recompute.mode": (("never", "inline"), f"recomputes inline or never; {_COMMAND}"),
    "recompute.segments": ((1,), "recomputes a stage as a whole; use recompute.segments=1"),
    "recompute.sets": ((None, 1), "recomputes a set just before its B; use recompute.sets=1"),
    "recompute.keep": ((None, "none"), "keeps all sets of a stage or none; use recompute.keep=none"),
    "recompute.selective": ((None,), "recomputes a stage as a whole; use recompute.selective=null"),
    "recompute.stash": ((None,), "holds what 1F1B holds; use recompute.stash=null"),
    "parallel.zero": ((0, 1), "takes ZeRO 0 or 1 with a pipeline; use parallel.zero=1"),
    "optim.name": ((ADAMW,), "is run with AdamW; use optim=adamw, or engine=native"),
    "precision": (
        ("auto", "fp32", "bf16_autocast"),
        "trains float32 weights: its bf16 without ZeRO saves a state that it cannot load; use precision=bf16_autocast or fp32",
    ),
    "model.compile": ((False,), "is run with layers as they are; use model.compile=false"),
}


def check_schedule(config: RunConfig) -> None:
    """The keys that a schedule is made from and simulated on: `pipeline`, `recompute` and `transport`, `cluster` and `cost`.

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
    """Every key of a training run.

    Raises:
        ConfigError: a value out of range, one that is not supported, or keys that do not fit each other.
    """
    check_schedule(config)
    in_parts = config.recompute.segments != 1  # which layers make a part depends on their bytes
    by_profile = "auto" in (config.pipeline.schedule, config.pipeline.balance) or in_parts
    if config.plan.profile is not None and not by_profile:
        raise ConfigError(
            f"plan.profile={config.plan.profile}: pipeline.schedule={config.pipeline.schedule} has its order whatever ops take, and "
            "pipeline.balance its layers; use `auto` for one of them, or leave plan.profile out (`pipetrain show` draws any schedule "
            "with it)"
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
            f"steps={config.steps} epochs={config.epochs:g}: both say how long the run is; give one, and type steps=null or epochs=null for the other"
        )
    phases_of(config)
    if config.model.dtype not in (None, "auto", WEIGHTS_IN[config.precision]):
        raise ConfigError(
            f"model.dtype={config.model.dtype}: precision={config.precision} trains {WEIGHTS_IN[config.precision]} weights; leave "
            "model.dtype out, and set precision=bf16 for bfloat16 weights"
        )
    for problem in _of_deepspeed(config) if config.engine.name == DEEPSPEED else _of_native(config):
        raise ConfigError(problem)
    _check_snapshots(config)
    if config.pipeline.num_microbatches > config.data.batch_size:
        raise ConfigError(
            f"pipeline.num_microbatches={config.pipeline.num_microbatches} is more than "
            f"data.batch_size={config.data.batch_size}: each microbatch needs a sample; use "
            f"pipeline.num_microbatches={config.data.batch_size} or less, or a larger data.batch_size"
        )


def check_samples(config: RunConfig, num_replicas: int) -> None:
    """Whether each microbatch of each replica gets a sample, and with engine=deepspeed as many as each other.

    Raises:
        ConfigError: it does not.
    """
    batch_size, num_microbatches = config.data.batch_size, config.pipeline.num_microbatches
    if batch_size < num_replicas * num_microbatches:
        fitting = batch_size // num_replicas
        fewer = f"pipeline.num_microbatches={fitting} or less" if fitting else f"{batch_size} replicas or less"
        raise ConfigError(
            f"data.batch_size={batch_size} is less than parallel.num_replicas={num_replicas} x "
            f"pipeline.num_microbatches={num_microbatches} = {num_replicas * num_microbatches}: each microbatch of each replica needs "
            f"a sample; use {fewer}, or data.batch_size={num_replicas * num_microbatches} or more"
        )
    for problem in _uneven(config, num_replicas) if config.engine.name == DEEPSPEED else ():
        raise ConfigError(problem)


def check_ties(config: RunConfig, tied: Sequence[tuple[int, int]]) -> None:
    """What an engine can do where pairs of stages share a parameter, as a head its embedding's.

    Raises:
        ConfigError: it cannot.
    """
    if tied and config.engine.name == DEEPSPEED:
        low, high = tied[0]
        raise ConfigError(
            f"engine=deepspeed: stages {low} and {high} share a parameter, whose gradients it does not add up; use engine=native, or a "
            "pipeline.balance that puts both its layers on one stage"
        )


def with_steps(config: RunConfig, *samples_per_epoch: int) -> RunConfig:
    """The configuration with its number of steps, now that the data is known: `epochs` times through it, rounded up to steps.

    `samples_per_epoch` are those of each phase. Of a phase that ends before, its share of an epoch counts.

    Raises:
        ConfigError: a phase would not begin.
    """
    if config.epochs is None:
        return replace(config, steps=config.num_steps)
    left, phases = config.epochs, phases_of(config)
    for (phase, num_steps), samples in zip(steps_of_phases(phases, phases[-1].first_step - 1), samples_per_epoch):
        batch_size = phase.config.data.batch_size
        if phase is phases[-1] or left * samples <= num_steps * batch_size:
            steps = phase.first_step - 1 + max(math.ceil(left * samples / batch_size), 1)
            break
        left -= num_steps * batch_size / samples
    known = replace(config, steps=steps, epochs=None)
    phases_of(known)
    return known


def _check_snapshots(config: RunConfig) -> None:
    """What needs regular snapshots has them."""
    if config.snapshot.every_steps is not None:
        return
    set_it = "set snapshot.every_steps, as in snapshot.every_steps=100"
    for key, value in (("guard.not_finite", config.guard.not_finite), ("guard.spike", config.guard.spike)):
        if value == "rollback":
            raise ConfigError(f"{key}=rollback: goes back to the newest snapshot, and there would be none; {set_it}")
    if (keep := config.snapshot.keep_every) is not None:
        raise ConfigError(
            f"snapshot.keep_every={keep}: keeps some of the regular snapshots, and there are none; {set_it}"
        )


def _of_native(config: RunConfig) -> Iterator[str]:
    if config.precision == "bf16" and config.optim.masters == "off" and config.optim.name != ADAMW:
        yield (
            f"optim.masters=off: optim={config.optim.name} updates float32 alone; use optim.masters=auto, or optim=adamw, which "
            "updates bfloat16 weights in place"
        )
    if config.parallel.zero > 1:
        yield (
            f"parallel.zero={config.parallel.zero}: not supported by engine=native, which shards optimizer state alone; use "
            "parallel.zero=1"
        )
    if config.parallel.zero and config.parallel.num_replicas == 1:
        yield (
            f"parallel.zero={config.parallel.zero} with parallel.num_replicas=1: there is no other replica to hold a share of the "
            "optimizer state; use parallel.zero=0, or more replicas, as in parallel.num_replicas=2"
        )


def _of_deepspeed(config: RunConfig) -> Iterator[str]:
    for key, (taken, instead) in _DEEPSPEED.items():
        value = functools.reduce(getattr, key.split("."), config)
        if value not in taken:
            yield _refused(key, value, instead)
    if config.model.name == HUGGING_FACE:
        yield _refused("model.name", HUGGING_FACE, "passes one tensor from stage to stage; use engine=native")
    if config.phases:
        yield _refused("phases", "[...]", "trains the whole run by one plan; use phases=[]")
    replicas = config.parallel.num_replicas
    yield from _uneven(config, replicas if isinstance(replicas, int) else 1)


def _uneven(config: RunConfig, num_replicas: int) -> Iterator[str]:
    """What DeepSpeed says to microbatches that differ in size."""
    num_microbatches = config.pipeline.num_microbatches
    if config.data.batch_size % (num_replicas * num_microbatches):
        replicas = f"parallel.num_replicas={num_replicas} x " if num_replicas > 1 else ""
        multiple = f"use a multiple of {replicas}pipeline.num_microbatches={num_microbatches}"
        yield _refused("data.batch_size", config.data.batch_size, f"wants microbatches of equal size; {multiple}")


def _refused(key: str, value: object, instead: str) -> str:
    return f"{key}={shown(value)}: not supported by engine=deepspeed, which {instead}"
