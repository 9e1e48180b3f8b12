"""Stages run by hand on one process, in GPipe order: what the executor does, without ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.runtime.cut import cut, weights_of
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.seeding import generators_restored, layer_seeds
from pipetrain.stage.stage import Stage

CPU = torch.device("cpu")


def make_stages(
    layers: Sequence[nn.Module],
    balance: Sequence[int],
    loss_fn: Callable[[Any, Any], Tensor],
    meter: ActivationMeter,
    selective: Sequence[str] = (),
) -> list[Stage]:
    stages, first = [], 0
    wanted = RecomputePolicy(selective=selective).selective
    for index, count in enumerate(balance):
        loss = loss_fn if index == len(balance) - 1 else None
        own = list(layers[first : first + count])
        stages.append(Stage(index, own, first_layer=first, device=CPU, meter=meter, loss_fn=loss, selective=wanted))
        first += count
    return stages


def run_step(
    stages: Sequence[Stage],
    inputs: Any,
    targets: Any,
    m: int,
    *,
    keep: Callable[[int], bool] = lambda microbatch: False,
    prove: Callable[[int], bool] = lambda microbatch: False,
    before_recompute: Callable[[int, int], None] = lambda stage, microbatch: None,
    step: int = 0,
    has_backward: bool = True,
    waiting: int | None = None,
    before_w: Callable[[], object] = lambda: None,
) -> Tensor:
    """All F, then R and B of each microbatch, last stage first; `has_backward`: R and B, too. `waiting`: in the place of B come I
    and, so many microbatches later or at the end, W; `before_w` is called when all B or I have run."""
    microbatches, labels = cut(inputs, m), cut(targets, m, "targets")
    weights = weights_of([pytree.tree_leaves(part)[0].shape[0] for part in microbatches])
    total = torch.zeros(())
    with generators_restored(CPU):
        for i in range(m):
            value = microbatches[i]
            wants: frozenset[int] = frozenset()
            for stage in stages:
                leaves, spec = pytree.tree_flatten(value)
                given = StageInput(
                    tuple(leaves),
                    spec,
                    wants,
                    lambda layers, i=i: layer_seeds(0, step, i, layers),
                    labels[i],
                    weights[i],
                )
                output = stage.forward(i, given, keep=keep(i), prove=prove(i), split=waiting is not None)
                value = pytree.tree_unflatten(output.leaves, output.spec)
                wants = frozenset(n for n, wanted in enumerate(output.wants_gradient) if wanted)
            total = total + value
        for i in range(m) if has_backward else ():
            gradients: Sequence[Tensor | None] = ()
            for stage in reversed(stages):
                if i not in stage._held:
                    break
                if not keep(i):
                    before_recompute(stage.index, i)
                    stage.recompute(i)
                gradients = stage.backward(i, gradients)
            if waiting is not None and i >= waiting:
                run_w(stages, i - waiting)
        before_w()
        for i in range(max(0, m - waiting), m) if waiting is not None else ():
            run_w(stages, i)
    for stage in stages:
        if has_backward:
            stage.end_step()
    return total


def run_w(stages: Sequence[Stage], microbatch: int) -> None:
    for stage in stages:
        if microbatch in stage._deferred:
            stage.backward_weights(microbatch)


def twins(layers: Sequence[nn.Module]) -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal models without gradients: one for the reference, one for the stages."""
    model = nn.Sequential(*layers)
    return copy.deepcopy(model), copy.deepcopy(model)


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Bit for bit, strides too; and some parameter has one."""
    assert any(parameter.grad is not None for parameter in reference.parameters())
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), f"{name} by {(ours.grad - theirs.grad).abs().max()}"
            assert ours.grad.stride() == theirs.grad.stride(), name
