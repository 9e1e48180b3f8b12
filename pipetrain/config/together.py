"""Whether the values of a configuration make a run: each within its range, and keys that must fit each other.

A range stands beside its field in `records.py`. What model, data, plan and schedule need for themselves is checked where
those are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipetrain.config.phases import phases_of, steps_of_phases
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import (
    ADAMW,
    DEEPSPEED,
    WEIGHTS_IN,
    GuardConfig,
    PipelineConfig,
    RecomputeConfig,
    RunConfig,
    SnapshotConfig,
    TransportConfig,
)
from pipetrain.config.schema import check_limits

_TRANSPORT = TransportConfig()
_COMMAND = "use engine=deepspeed pipeline=1f1b recompute=inline, or engine=native"


def check_schedule(config: RunConfig) -> None:
    """The keys that a schedule is made from and simulated on: `pipeline`, `recompute` and `transport`, `cluster` and `cost`.

    Raises:
        ConfigError: a value out of range, or one that is not supported.
    """
    check_limits(config.pipeline, "pipeline.")
    check_limits(config.recompute, "recompute.")
    check_limits(config.transport, "transport.")
    check_limits(config.cluster, "cluster.")
    check_limits(config.cost, "cost.")
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
    _check_guard(config.guard, config.snapshot)
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


def _check_guard(guard: GuardConfig, snapshot: SnapshotConfig) -> None:
    for key, value in (("guard.not_finite", guard.not_finite), ("guard.spike", guard.spike)):
        if value == "rollback" and snapshot.every_steps is None:
            raise ConfigError(
                f"{key}=rollback: goes back to the newest snapshot, and there would be none; set snapshot.every_steps, as in "
                "snapshot.every_steps=100"
            )
    if snapshot.keep_every is not None and snapshot.every_steps is None:
        raise ConfigError(
            f"snapshot.keep_every={snapshot.keep_every}: keeps some of the regular snapshots, and there are none; set "
            "snapshot.every_steps, as in snapshot.every_steps=100"
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
    yield from _schedule_of_deepspeed(config.pipeline)
    yield from _of_transport(config.transport)
    yield from _recompute_of_deepspeed(config.recompute)
    if config.parallel.zero > 1:
        yield _refused("parallel.zero", config.parallel.zero, "takes ZeRO 0 or 1 with a pipeline; use parallel.zero=1")
    if config.optim.name != ADAMW:
        yield _refused("optim.name", config.optim.name, "is run with AdamW; use optim=adamw, or engine=native")
    if config.precision == "bf16":
        yield _refused(
            "precision",
            "bf16",
            "trains float32 weights: its bf16 without ZeRO saves a state that it cannot load; use precision=bf16_autocast or fp32",
        )
    if config.model.name == "hf":
        yield _refused("model.name", "hf", "passes one tensor from stage to stage; use engine=native")
    if config.phases:
        yield _refused("phases", "[...]", "trains the whole run by one plan; use phases=[]")
    if config.model.compile:
        yield _refused("model.compile", "true", "is run with layers as they are; use model.compile=false")
    replicas = config.parallel.num_replicas
    yield from _uneven(config, replicas if isinstance(replicas, int) else 1)


def _uneven(config: RunConfig, num_replicas: int) -> Iterator[str]:
    """What DeepSpeed says to microbatches that differ in size."""
    num_microbatches = config.pipeline.num_microbatches
    if config.data.batch_size % (num_replicas * num_microbatches):
        replicas = f"parallel.num_replicas={num_replicas} x " if num_replicas > 1 else ""
        multiple = f"use a multiple of {replicas}pipeline.num_microbatches={num_microbatches}"
        yield _refused("data.batch_size", config.data.batch_size, f"wants microbatches of equal size; {multiple}")


def _recompute_of_deepspeed(recompute: RecomputeConfig) -> Iterator[str]:
    if recompute.mode not in ("never", "inline"):
        yield _refused("recompute.mode", recompute.mode, f"recomputes inline or never; {_COMMAND}")
    if recompute.segments != 1:
        yield _refused(
            "recompute.segments", recompute.segments, "recomputes a stage as a whole; use recompute.segments=1"
        )
    if recompute.sets not in (None, 1):
        yield _refused("recompute.sets", recompute.sets, "recomputes a set just before its B; use recompute.sets=1")
    if recompute.keep == "auto":
        yield _refused("recompute.keep", recompute.keep, "keeps all sets of a stage or none; use recompute.keep=none")
    if recompute.selective is not None:
        shown = recompute.selective
        yield _refused("recompute.selective", shown, "recomputes a stage as a whole; use recompute.selective=null")
    if recompute.stash is not None:
        yield _refused("recompute.stash", recompute.stash, "holds what 1F1B holds; use recompute.stash=null")


def _schedule_of_deepspeed(pipeline: PipelineConfig) -> Iterator[str]:
    if pipeline.schedule != "1f1b":
        yield _refused("pipeline.schedule", pipeline.schedule, f"runs 1F1B alone; {_COMMAND}")
    if pipeline.stages_per_rank != 1:
        yield _refused(
            "pipeline.stages_per_rank",
            pipeline.stages_per_rank,
            "has one stage per rank; use pipeline.stages_per_rank=1",
        )
    if pipeline.placement != "loop":
        yield _refused("pipeline.placement", pipeline.placement, "holds stage s on rank s; use pipeline.placement=loop")
    if pipeline.split_backward:
        yield _refused("pipeline.split_backward", "true", "runs each B as a whole; use pipeline.split_backward=false")
    if pipeline.warmup is not None:
        yield _refused("pipeline.warmup", pipeline.warmup, "fills the pipeline as 1F1B does; use pipeline.warmup=null")


def _of_transport(transport: TransportConfig) -> Iterator[str]:
    for key, value in vars(transport).items():
        if value != getattr(_TRANSPORT, key):
            yield _refused(f"transport.{key}", value, "sends messages in its own way; use transport=auto")


def _refused(key: str, value: object, instead: str) -> str:
    shown = list(value) if isinstance(value, tuple) else value
    return f"{key}={shown}: not supported by engine=deepspeed, which {instead}"
