"""What an engine does not do (the key, the values that it takes, why, and what to type instead), and what is not installed. Without torch."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from operator import attrgetter

from pipetrain.config.problem import ConfigError, shown
from pipetrain.config.records import ADAMW, DEEPSPEED, NATIVE, RunConfig, TransportConfig
from pipetrain.config.target import ENGINES, OP_HANDLERS, load_extension

# Of DeepSpeed's engine: by key the values that it takes, and why no other.
_COMMAND = "use engine=deepspeed pipeline=1f1b recompute=inline, or engine=native"
_IN_ONE = "recomputes a stage as a whole; use"
_TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "pipeline.schedule": (("1f1b",), f"runs 1F1B alone; {_COMMAND}"),
    "pipeline.stages_per_rank": ((1,), "has one stage per rank; use pipeline.stages_per_rank=1"),
    "pipeline.placement": (("loop",), "holds stage s on rank s; use pipeline.placement=loop"),
    "pipeline.split_backward": ((False,), "runs each B as a whole; use pipeline.split_backward=false"),
    "pipeline.on_call": ((None,), "runs no function between its ops; use engine=native"),
    "pipeline.warmup": ((None,), "fills the pipeline as 1F1B does; use pipeline.warmup=null"),
    **{
        f"transport.{key}": ((value,), "sends messages in its own way; use transport=auto")
        for key, value in vars(TransportConfig()).items()
    },
    "recompute.mode": (("never", "inline"), f"recomputes inline or never; {_COMMAND}"),
    "recompute.segments": ((1,), f"{_IN_ONE} recompute.segments=1"),
    "recompute.sets": ((None, 1), "recomputes a set just before its B; use recompute.sets=1"),
    "recompute.keep": ((None, "none"), "keeps all sets of a stage or none; use recompute.keep=none"),
    "recompute.selective": ((None,), f"{_IN_ONE} recompute.selective=null"),
    "recompute.keep_layers": ((None,), f"{_IN_ONE} recompute.keep_layers=null"),
    "recompute.offload": (
        ("none",),
        f"copies no sets to host memory; {_COMMAND.split(' or ')[-1]}, or recompute.offload=none",
    ),
    "recompute.stash": ((None,), "holds what 1F1B holds; use recompute.stash=null"),
    "parallel.zero_stage": ((0, 1), "takes ZeRO 0 or 1 with a pipeline; use parallel.zero_stage=1"),
    "optim.name": ((ADAMW,), "is run with AdamW; use optim=adamw, or engine=native"),
    "precision": (
        ("auto", "fp32", "bf16-mixed"),
        "trains float32 weights: its bf16 without ZeRO saves a state that it cannot load; use precision=bf16-mixed or fp32",
    ),
    "model.compile": ((False,), "is run with layers as they are; use model.compile=false"),
    "model.name": (("llama", "gpt2"), "passes one tensor from stage to stage; use engine=native"),
    "data.name": (
        ("stdlib", "text", "jsonl", "hf", "memmap"),
        "gives every rank the batch; use engine=native with data=python",
    ),
    "phases": (((),), "trains the whole run by one plan; use phases=[]"),
}


def check_engine(config: RunConfig, num_replicas: int | None = None, tied: Sequence[tuple[int, int]] = ()) -> None:
    """Whether the engine can do what the keys say; `tied` are pairs of stages that share a parameter, where they are known.

    Raises ConfigError: it cannot.
    """
    given = config.parallel.num_replicas
    num_replicas = num_replicas or (given if isinstance(given, int) else 1)
    if config.engine.name == NATIVE:
        _check_native(config)
    if config.engine.name == DEEPSPEED:  # what an engine of the user's own refuses is not known here
        _check_deepspeed(config, num_replicas, tied)


def _check_native(config: RunConfig) -> None:
    optim, parallel = config.optim, config.parallel
    if config.precision == "bf16-true" and optim.masters == "off" and optim.name != ADAMW:
        raise ConfigError(
            f"optim.masters=off: optim={optim.name} updates float32 alone; use optim.masters=auto, or optim=adamw, which updates bfloat16 "
            "weights in place"
        )
    if parallel.zero_stage > 1:
        raise ConfigError(
            f"parallel.zero_stage={parallel.zero_stage}: not supported by engine=native, which shards optimizer state alone; use parallel.zero_stage=1"
        )
    if parallel.zero_stage and parallel.num_replicas == 1:
        raise ConfigError(
            f"parallel.zero_stage={parallel.zero_stage} with parallel.num_replicas=1: there is no other replica to hold a share of the optimizer "
            "state; use parallel.zero_stage=0, or more replicas, as in parallel.num_replicas=2"
        )


def _check_deepspeed(config: RunConfig, num_replicas: int, tied: Sequence[tuple[int, int]]) -> None:
    for key, (taken, instead) in _TAKEN.items():
        if (value := attrgetter(key)(config)) not in taken:
            raise ConfigError(f"{key}={shown(value)}: not supported by engine=deepspeed, which {instead}")
    num_microbatches = config.pipeline.num_microbatches
    if config.data.global_batch_size % (num_replicas * num_microbatches):
        replicas = f"parallel.num_replicas={num_replicas} x " if num_replicas > 1 else ""
        raise ConfigError(
            f"data.global_batch_size={config.data.global_batch_size}: not supported by engine=deepspeed, which wants microbatches of equal size; use a "
            f"multiple of {replicas}pipeline.num_microbatches={num_microbatches}"
        )
    for low, high in tied:
        raise ConfigError(
            f"engine=deepspeed: stages {low} and {high} share a parameter, whose gradients it does not add up; use engine=native, or a "
            "pipeline.balance that puts both its layers on one stage"
        )


def check_available(config: RunConfig) -> None:
    """Raises ConfigError: DeepSpeed or a compiler is missing, or the user's own engine or `pipeline.on_call` cannot be imported."""
    if config.engine.name not in (NATIVE, DEEPSPEED):
        load_extension("engine.name", config.engine.name, ENGINES)
    if config.pipeline.on_call is not None:
        load_extension("pipeline.on_call", config.pipeline.on_call, OP_HANDLERS)
    key = "engine=deepspeed" if config.engine.name == DEEPSPEED else f"optim={config.optim.name}"
    if config.engine.name != DEEPSPEED and config.optim.name == ADAMW:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f'{key}: DeepSpeed is not installed; pip install "pipetrain[deepspeed]" brings it')
    if config.optim.name != ADAMW and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError(
            f"{key}: it is compiled at its first use, and there is no C++ compiler; install g++, or use optim=adamw"
        )
