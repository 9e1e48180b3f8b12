"""Whether the engine and the optimizer of a run can do what it asks for, and are installed. Without torch: before any process starts."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence

from pipetrain.config.problem import ConfigError
from pipetrain.config.records import ADAMW, DEEPSPEED, RunConfig
from pipetrain.engine.deepspeed.refused import refused


def check_engine(config: RunConfig, num_replicas: int | None = None, tied: Sequence[tuple[int, int]] = ()) -> None:
    """Whether the engine can do what the keys say; `tied` are pairs of stages that share a parameter, where they are known.

    Raises:
        ConfigError: it cannot.
    """
    given = config.parallel.num_replicas
    num_replicas = num_replicas or (given if isinstance(given, int) else 1)
    is_deepspeed = config.engine.name == DEEPSPEED
    for problem in refused(config, num_replicas, tied) if is_deepspeed else _refused_by_native(config):
        raise ConfigError(problem)


def _refused_by_native(config: RunConfig) -> Iterator[str]:
    optim, parallel = config.optim, config.parallel
    if config.precision == "bf16-true" and optim.masters == "off" and optim.name != ADAMW:
        yield (
            f"optim.masters=off: optim={optim.name} updates float32 alone; use optim.masters=auto, or optim=adamw, which updates bfloat16 "
            "weights in place"
        )
    if parallel.zero_stage > 1:
        yield (
            f"parallel.zero_stage={parallel.zero_stage}: not supported by engine=native, which shards optimizer state alone; use parallel.zero_stage=1"
        )
    if parallel.zero_stage and parallel.num_replicas == 1:
        yield (
            f"parallel.zero_stage={parallel.zero_stage} with parallel.num_replicas=1: there is no other replica to hold a share of the optimizer "
            "state; use parallel.zero_stage=0, or more replicas, as in parallel.num_replicas=2"
        )


def check_available(config: RunConfig) -> None:
    """Raises:
    ConfigError: DeepSpeed or a compiler is missing.
    """
    key = "engine=deepspeed" if config.engine.name == DEEPSPEED else f"optim={config.optim.name}"
    if config.engine.name != DEEPSPEED and config.optim.name == ADAMW:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f'{key}: DeepSpeed is not installed; pip install "pipetrain[deepspeed]" brings it')
    if config.optim.name != ADAMW and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError(
            f"{key}: it is compiled at its first use, and there is no C++ compiler; install g++, or use optim=adamw"
        )
