"""The engine that the configuration names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipetrain.config.engines import DEEPSPEED
from pipetrain.config.records import RunConfig
from pipetrain.engine.engine import Engine
from pipetrain.engine.native import NativeEngine
from pipetrain.plan.plan import Plan
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.schedule import Schedule


def make_engine(
    config: RunConfig,
    plan: Plan,
    schedule: Schedule,
    *,
    vocabulary_size: int,
    device: torch.device,
    on_event: Callable[[OpEvent], None],
) -> Engine:
    """An engine with the weights of `config.seed`. DeepSpeed's tells of no ops, so `on_event` hears nothing from it."""
    if config.engine.name == DEEPSPEED:
        from pipetrain.engine.deepspeed.engine_deepspeed import (
            DeepSpeedEngine,
        )  # takes seconds to import, and may not be installed

        return DeepSpeedEngine(config, plan, vocabulary_size=vocabulary_size, device=device)
    return NativeEngine(config, plan, schedule, vocabulary_size=vocabulary_size, device=device, on_event=on_event)
