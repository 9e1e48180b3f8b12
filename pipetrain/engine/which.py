"""The engine that the configuration names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipetrain.config.records import DEEPSPEED, RunConfig
from pipetrain.engine.available import check_engine
from pipetrain.engine.engine import Engine, precision_of
from pipetrain.engine.native import NativeEngine
from pipetrain.models.sharing import ties_of
from pipetrain.models.spec import ModelSpec, with_compiled_layers, with_weights_in
from pipetrain.plan.plan import Plan
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.schedule import Schedule


def make_engine(
    config: RunConfig,
    spec: ModelSpec,
    plan: Plan,
    schedule: Schedule,
    *,
    device: torch.device,
    on_event: Callable[[OpEvent], None],
) -> Engine:
    """An engine that trains the model of `spec` by this plan, with the weights of `config.seed`, in `config.precision`.

    DeepSpeed's tells of no ops, so `on_event` hears nothing from it, and takes the policy of the schedule, not its order.

    Raises:
        ValueError: a model without a loss, or one that the engine cannot cut so.
    """
    if spec.loss_fn is None:
        raise ValueError("a model without a loss cannot be trained: its ModelSpec needs a loss_fn")
    check_engine(config, plan.num_replicas, plan.tied_stages(tie.layers for tie in ties_of(spec.tied, plan.stage_of)))
    precision = precision_of(config.precision, device)
    spec = with_weights_in(spec, precision.weights)
    if config.model.compile:
        spec = with_compiled_layers(spec)
    if config.engine.name == DEEPSPEED:
        # Imported here: it takes seconds, and may not be installed.
        from pipetrain.engine.deepspeed.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, spec, plan, schedule, device=device, precision=precision)
    return NativeEngine(config, spec, plan, schedule, device=device, precision=precision, on_event=on_event)
