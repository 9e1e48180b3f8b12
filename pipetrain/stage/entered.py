"""Tensors as a stage was given them, and whether its layers changed one in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Gate(torch.autograd.Function):
    """Where a received tensor enters the graph of its stage, and where its gradient is picked up.

    A leaf with `.grad` would do, but accumulation may rewrite the strides of the gradient, which changes later sums by a
    bit, and a leaf cannot be changed in place by the first layer. `anchor` makes the output require a gradient; the
    tensor itself is not held by the graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor], leaf: int) -> Tensor:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.leaf = sink, leaf
        # Neither the very tensor nor a view of it: autograd forbids in-place changes of what a Function returns of its input.
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        if gradients[0] is not None:
            ctx.sink[ctx.leaf] = gradients[0]
        return None, None, None, None


@dataclass(frozen=True)
class Entered:
    """One tensor, and its version when it entered.

    `fixed` says what it is and why it may not change; empty: it may. `before` is a copy, or the memory that it was cloned from:
    with it even a change through `.data` is found, which no version tells.
    """

    tensor: Tensor
    version: int
    fixed: str = ""
    before: Tensor | None = None

    @staticmethod
    def of(tensor: Tensor, fixed: str = "", before: Tensor | None = None) -> Entered:
        return Entered(tensor, tensor._version, fixed, before)

    def has_changed(self) -> bool:
        if self.tensor._version != self.version:
            return True
        return self.before is not None and not _is_equal(self.tensor.detach(), self.before)


def entered_targets(target: Any, fixed: Mapping[int, str], *, recomputed: bool, look: bool) -> Iterable[Entered]:
    """The tensors of a target that `loss_fn` may not change: those that are `fixed`, and all where R will read them again."""
    for number, leaf in enumerate(pytree.tree_leaves(target)):
        if isinstance(leaf, Tensor) and (recomputed or number in fixed):
            why = (
                fixed.get(number)
                or f"leaf {number} of its target, which loss_fn gets a second time when it is recomputed"
            )
            yield Entered.of(leaf, why, leaf.clone() if look else None)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to itself; what has no entries in a row (sparse) is taken for equal."""
    if one.layout is not torch.strided or one.is_nested:
        return True
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
