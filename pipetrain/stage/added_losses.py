"""Losses that layers add to the loss of their microbatch (`pipetrain.add_loss`). Their sum goes with the output from stage to stage.

stage 0   a0, the sum of its losses    leaves the stage as one more output tensor, so B gets its gradient as that of any other output
stage 1   a0 + a1
last      loss_fn(...) + (a0 + a1)     times the weight of the microbatch
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The object whose `of_layer` `add_loss` appends to; None: no layer of a pipeline runs.
_IN_FORCE: ContextVar[AddedLosses | None] = ContextVar("added losses", default=None)
# The code through which every call of a module goes.
_CALLS = frozenset({nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__})


def add_loss(loss: Tensor) -> None:
    """In the forward of any layer of a pipeline, add `loss` to its microbatch's loss, for example for the load balance of experts.

    Like the loss of `loss_fn`, it is multiplied by the weight of its microbatch and back-propagated. The loss that `step` and `evaluate`
    return on every rank contains it. Added losses are summed in the order of the layers and of their calls, and the sum is added to the
    loss of `loss_fn`. `add_loss` has no effect in a recompute, in a call of the pipeline without a loss, and in a module that runs outside
    of a pipeline.

    Args:
        loss: 0-dim, of a floating-point dtype, on the layer's device; in a step it needs a gradient.

    Raises:
        ValueError: `loss` is not such a tensor, or needs no gradient in a step.
        RuntimeError: no forward of a module runs.
    """
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        found = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"add_loss was given {found}: give a 0-dim floating-point tensor, such as aux.mean()")
    is_compiling = torch.compiler.is_compiling()  # if so, leave out the checks that torch.compile cannot trace
    if not is_compiling and torch._C._current_graph_task_id() != -1:
        return  # torch.utils.checkpoint runs a forward again, in its backward
    in_force = _IN_FORCE.get()
    if in_force is not None:
        if in_force.needs_gradient and not loss.requires_grad:
            raise ValueError(
                "add_loss was given a loss that needs no gradient: detach(), item() and torch.no_grad() cut it off, or all that it is "
                "made from is frozen. In that case do not call add_loss"
            )
        in_force.of_layer.append(loss.clone())  # the layer may change its own tensor later
    elif not is_compiling and not _is_in_a_module():
        raise RuntimeError(
            "add_loss was called outside of a forward: call it in the forward of a layer of the pipeline; in loss_fn, add the term to "
            "the returned loss"
        )


def _is_in_a_module() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    return frame is not None


class WithLosses(NamedTuple):
    """The output of a stage with the 0-dim sum of all losses that were added in it and in the stages before."""

    output: Any
    losses: Tensor


class AddedLosses:
    """In its block `add_loss` appends to `of_layer`. `losses` has the sum from the stages before, then the losses of layers that have
    ended. `value` is the input of the stage's first layer."""

    __slots__ = ("_around", "losses", "needs_gradient", "of_layer", "value")

    def __init__(self, given: Any = None) -> None:
        is_with_losses = type(given) is WithLosses
        self.value = given.output if is_with_losses else given
        self.losses: list[Tensor] = [given.losses] if is_with_losses else []
        # A new list for each layer, because compiled code is specialised on its length.
        self.of_layer: list[Tensor] = []
        self.needs_gradient = torch.is_grad_enabled()
        self._around = _IN_FORCE.get()

    def __enter__(self) -> AddedLosses:
        _IN_FORCE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _IN_FORCE.set(self._around)

    def beside(self, output: Any) -> Any:
        """`output` with the sum of the losses so far; `output` itself if there are none."""
        return WithLosses(output, self._sum()) if self.losses else output

    def added_to(self, loss: Tensor) -> Tensor:
        """The loss of `loss_fn`, plus the losses that layers and `loss_fn` itself gave to `add_loss`."""
        self.losses += self.of_layer
        self.of_layer = []
        return loss + self._sum()

    def _sum(self) -> Tensor:
        first, *others = self.losses
        return sum(others, first)
