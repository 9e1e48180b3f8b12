"""Whether the values of a configuration make a run: ranges, what is not supported, keys that must fit each other.

What model, data, plan and schedule need for themselves is checked where those are made.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipetrain.config.engines import DEEPSPEED, NATIVE, OPTIMIZERS, check_engine
from pipetrain.config.problem import ConfigError, not_a_choice
from pipetrain.config.records import RunConfig


@dataclass(frozen=True)
class _Range:
    """The values that a key may have; null is always left to its type."""

    keys: tuple[str, ...]
    holds: Callable[[Any], object]  # true or false
    allowed: str


@dataclass(frozen=True)
class _Only:
    """A key of the configuration of which this version supports one value."""

    key: str
    value: object
    instead: str


_SCHEDULE_RANGES = (
    _Range(
        ("pipeline.num_stages", "pipeline.stages_per_rank", "pipeline.num_microbatches", "recompute.ahead"),
        lambda value: value >= 1,
        "1 or more",
    ),
    _Range(("recompute.keep",), lambda value: value >= 0, "0 or more"),
)
_RUN_RANGES = (
    _Range(
        (
            "steps",
            "threads_per_rank",
            "observe.evaluate_every_steps",
            "snapshot.every_steps",
            "snapshot.keep_last",
            "snapshot.keep_every",
            "guard.spike_window",
        ),
        lambda value: value >= 1,
        "1 or more",
    ),
    _Range(("guard.spike_factor", "guard.spike_norm_factor"), lambda value: value > 1, "more than 1"),
    _Range(("guard.max_skips", "guard.max_rollbacks"), lambda value: value >= 0, "0 or more"),
    _Range(
        ("cluster.num_nodes", "cluster.gpus_per_node", "cluster.cpus_per_rank", "cluster.signal_seconds"),
        lambda value: value >= 1,
        "1 or more",
    ),
    _Range(("cluster.max_restarts",), lambda value: value >= 0, "0 or more"),
    _Range(("cluster.name",), lambda value: value in ("local", "slurm"), "local or slurm"),
    _Range(("cluster.device",), lambda value: value in ("gpu", "cpu"), "gpu or cpu"),
    _Range(
        ("cluster.rendezvous",),
        lambda value: re.fullmatch(r"[^\s:]+:\d{1,5}", value) and 0 < int(value.rpartition(":")[2]) < 65536,
        "HOST:PORT of the first machine, as in node1:29500",
    ),
    _Range(
        ("cluster.time_limit",),
        lambda value: re.fullmatch(r"[1-9]\d*|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", str(value)),
        "minutes, H:M:S or D-H:M:S, as in 90, 12:00:00 or 2-00:00:00",
    ),
    _Range(
        ("cluster.partition", "cluster.account", "cluster.interface"),
        lambda value: re.fullmatch(r"[\w.@,:+-]+", value),
        "a name without spaces",
    ),
    _Range(
        ("cluster.options",),
        lambda value: all(re.fullmatch(r"--[a-z][^\n]*", option) for option in value),
        'a list of options of sbatch, as in ["--qos=long","--exclusive"]',
    ),
    _Range(("seed", "optim.warmup_steps", "optim.weight_decay"), lambda value: value >= 0, "0 or more"),
    _Range(("timeout_seconds", "optim.learning_rate", "optim.clip_norm"), lambda value: value > 0, "more than 0"),
    _Range(
        ("observe.wandb.mode",),
        lambda value: value in ("disabled", "offline", "online"),
        "disabled, offline or online",
    ),
    _Range(("optim.final_fraction",), lambda value: 0 <= value <= 1, "from 0 to 1"),
    _Range(("engine.name",), lambda value: value in (NATIVE, DEEPSPEED), f"{NATIVE} or {DEEPSPEED}"),
    _Range(("optim.name",), lambda value: value in OPTIMIZERS, ", ".join(OPTIMIZERS)),
    _Range(("parallel.zero",), lambda value: 0 <= value <= 3, "from 0 to 3"),
    _Range(
        ("optim.betas",), lambda value: all(0 <= beta < 1 for beta in value), "two numbers, each from 0 to less than 1"
    ),
)
_GUARD_CHOICES = {
    "guard.not_finite": ("stop", "skip", "rollback"),
    "guard.spike": ("off", "stop", "skip", "rollback"),
}
_SCHEDULE_ONLY = (_Only("recompute.granularity", "stage", "an R brings back the whole stage"),)
_RUN_ONLY = (
    _Only("parallel.num_replicas", 1, "use more stages (pipeline.num_stages) for more ranks"),
    _Only("parallel.fsdp", False, "parameters are not sharded; use more stages (pipeline.num_stages) to save memory"),
    _Only("parallel.tensor", 1, "layers are not split; use more stages (pipeline.num_stages) for more ranks"),
    _Only("data.tokenizer", "byte", "text is read byte by byte"),
    _Only("model.path", None, "the model is built from the keys of `model` (model=llama, model=gpt2)"),
)


def check_schedule(config: RunConfig) -> None:
    """The keys that a schedule is made from: `pipeline` and `recompute`.

    Raises:
        ConfigError: a value out of range, or one that is not supported.
    """
    _check(config, _SCHEDULE_RANGES, _SCHEDULE_ONLY)
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
    if config.pipeline.schedule == "inference":
        raise ConfigError(
            "pipeline.schedule=inference: it has no backward, so nothing is trained; use pipeline.schedule=gpipe"
        )
    _check(config, _RUN_RANGES, _RUN_ONLY)
    check_engine(config)
    _check_guard(config)
    if config.pipeline.num_microbatches > config.data.batch_size:
        raise ConfigError(
            f"pipeline.num_microbatches={config.pipeline.num_microbatches} is more than "
            f"data.batch_size={config.data.batch_size}: each microbatch needs a sample; use "
            f"pipeline.num_microbatches={config.data.batch_size} or less, or a larger data.batch_size"
        )


def _check_guard(config: RunConfig) -> None:
    for key, allowed in _GUARD_CHOICES.items():
        value = _value(config, key)
        if value not in allowed:
            raise not_a_choice(key, value, allowed)
        if value == "rollback" and config.snapshot.every_steps is None:
            raise ConfigError(
                f"{key}=rollback: goes back to the newest snapshot, and there would be none; set snapshot.every_steps, as in "
                "snapshot.every_steps=100"
            )
    if config.snapshot.keep_every is not None and config.snapshot.every_steps is None:
        raise ConfigError(
            f"snapshot.keep_every={config.snapshot.keep_every}: keeps some of the regular snapshots, and there are none; set "
            "snapshot.every_steps, as in snapshot.every_steps=100"
        )


def _check(config: RunConfig, ranges: Sequence[_Range], only: Sequence[_Only]) -> None:
    for rule in only:
        value = _value(config, rule.key)
        if value != rule.value:
            raise ConfigError(f"{rule.key}={value}: not supported, only {_shown(rule.value)} is; {rule.instead}")
    for limit in ranges:
        for key in limit.keys:
            value = _value(config, key)
            if value is not None and not limit.holds(value):
                raise ConfigError(f"{key}={value}: allowed is {limit.allowed}")
            if isinstance(value, float) and math.isinf(value):
                raise ConfigError(f"{key}={value}: allowed is a finite number, {limit.allowed}")


def _value(config: RunConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
