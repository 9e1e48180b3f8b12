"""Whether what the engine and the optimizer of a run need is there."""

from __future__ import annotations

import importlib.util
import shutil

from pipetrain.config.problem import ConfigError
from pipetrain.config.records import ADAMW, DEEPSPEED, FUSED_ADAM, RunConfig


def check_available(config: RunConfig) -> None:
    """Before any process starts.

    Raises:
        ConfigError: DeepSpeed, a compiler or a GPU is missing.
    """
    key = "engine=deepspeed" if config.engine.name == DEEPSPEED else f"optim={config.optim.name}"
    if config.engine.name != DEEPSPEED and config.optim.name == ADAMW:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f'{key}: DeepSpeed is not installed; pip install "pipetrain[deepspeed]" brings it')
    if config.optim.name == ADAMW:
        return
    if config.optim.name == FUSED_ADAM and not _has_cuda():
        raise ConfigError(f"{key}: this kernel runs on CUDA, and there is none; use optim=adamw or deepspeed_cpu_adam")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError(
            f"{key}: it is compiled at its first use, and there is no C++ compiler; install g++, or use optim=adamw"
        )


def _has_cuda() -> bool:
    import torch  # seconds, and only for who asks for CUDA

    return torch.cuda.is_available()
