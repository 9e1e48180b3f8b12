"""F of a stage without a graph: for `evaluate`, for a call of the pipeline without a loss, and for generation token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipetrain.stage.added_losses import AddedLosses
from pipetrain.stage.microbatch import StageInput, StageOutput, without_local
from pipetrain.stage.past import Past, run_cached
from pipetrain.stage.segments import AnyStage, SegmentedStage
from pipetrain.stage.stage import Stage


def infer(stage: AnyStage, given: StageInput, *, with_loss: bool, past: Past | None = None) -> StageOutput:
    """F without a graph. `with_loss`: the last stage ends with the weighted loss. With `past`, layers read earlier tokens from it, and F
    runs in inference mode: without torch's bookkeeping for a backward, a token takes a tenth less time."""
    for part in stage.parts if isinstance(stage, SegmentedStage) else (stage,):
        output = _infer(part, given, with_loss=with_loss, past=past)
        given = given._replace(leaves=output.leaves, spec=output.spec)
    return output


def _infer(stage: Stage, given: StageInput, *, with_loss: bool, past: Past | None) -> StageOutput:
    calls: list[Callable[[Any], Any]] = list(stage.layers)
    seeds: list[int] = []
    if past is None:
        seeds = given.seeds_of(stage.indices)
    else:
        calls = [functools.partial(run_cached, layer, past=past) for layer in calls]
    tree = pytree.tree_unflatten(list(given.leaves), given.spec)
    with torch.no_grad() if past is None else torch.inference_mode(), AddedLosses(tree) as added:
        value = added.value
        if with_loss and stage.loss_fn is not None:
            calls.append(functools.partial(stage.weighted_loss, stage.loss_fn, given=given, added=added))
        for number, call in enumerate(calls):
            if past is None:
                stage.state.seeders[number](seeds[number])
            added.of_layer = []
            value = call(value)
            added.losses += added.of_layer
        if with_loss and stage.loss_fn is None:
            value = added.beside(value)
    leaves, spec = pytree.tree_flatten(without_local(value))
    return StageOutput(tuple(leaves), spec, (False,) * len(leaves))


def prepare_stage(stage: AnyStage, past: Past) -> None:
    """While the input is still being received, let layers compute what depends only on the positions of the new tokens."""
    with torch.inference_mode():
        for layer in stage.layers:
            if (prepare := getattr(layer, "prepare_cached", None)) is not None:
                prepare(past)
