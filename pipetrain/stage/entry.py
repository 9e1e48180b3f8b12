"""How tensors enter a stage, or in R the layer after a kept layer. Checks whether layers have changed them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.stage.errors import input_changed
from pipetrain.stage.tensor_copies import copy_of, same_values

if TYPE_CHECKING:
    from pipetrain.stage.microbatch import StageInput


class Gate(torch.autograd.Function):
    """Where a received tensor enters the graph of its stage, and where its gradient is picked up.

    A leaf with `.grad` would not do: no layer may change a leaf in place, and accumulation may change the gradient's strides, and so a last
    bit of later sums. `anchor` makes the output require a gradient. The graph does not hold the tensor itself.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor], leaf: int) -> Tensor:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.leaf = sink, leaf
        # Return `.data`: if a Function returns its input or a view, autograd forbids in-place changes.
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        if gradients[0] is not None:
            ctx.sink[ctx.leaf] = gradients[0]
        return None, None, None, None


# `Gate.apply` without its check for torch.func, which never runs around a stage. It takes half as long.
_apply = super(torch.autograd.Function, Gate).apply
# Torch's own node for a graph that no backward runs through, as that of R. It takes a third of the time of `Gate`.
_without_backward = torch._C._functions.DelayedError("no backward runs through the graph of a recompute", 2)
NODE_WITHOUT_BACKWARD = "Error"  # the name of its type


def through_gate(anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor] | None = None, leaf: int = 0) -> Tensor:
    """`tensor` as it enters a graph: it needs a gradient, and is no leaf, because a layer may change it in place. `sink` gets the gradient;
    without it, no backward may run through the graph."""
    if sink is None:
        return _without_backward(anchor, tensor.data)[1]
    return _apply(anchor, tensor, sink, leaf)  # type: ignore[no-any-return, no-untyped-call]


class Entered(NamedTuple):
    """One tensor, and its version when it entered. `fixed`: why no stage may change it, or empty. `before`: a copy of the tensor, or the
    leaf from which it was cloned. A comparison with it finds changes through `.data`, which versions miss. `is_clone`: the tensor is a
    clone of a leaf; ignored if `fixed`."""

    tensor: Tensor
    version: int
    fixed: str
    before: Tensor | None
    is_clone: bool


class Entry:
    """The entry of one stage. Layers that are known to change the input in place get a clone, because R reads the input again.
    `title` names the stage in errors, `name_of` its layers up to the index `last`."""

    def __init__(self, anchor: Tensor, title: str, name_of: Callable[[int], str], last: int, has_loss: bool) -> None:
        self._anchor, self._title, self._name_of, self._last, self._has_loss = anchor, title, name_of, last, has_loss
        self._clones = False
        self._is_known = False  # whether the layers have run once

    def enter(
        self, given: StageInput, sink: dict[int, Tensor] | None, *, recomputed: bool, clone: bool = False
    ) -> tuple[Any, list[Entered]]:
        """The input tree for the first layer, and the tensors that `check` examines after the last layer. `sink` gets the gradients; R has
        none. `recomputed`: an R reads the input again. `clone`: clone the leaves even if no layer is known to change them."""
        clones = clone or ((recomputed or given.is_shared) and self._clones) or (given.is_shared and not self._is_known)
        # In the first run, and when the layers get their first clone, also look for changes through `.data`.
        look = not self._is_known or (clones and not self._clones)
        is_read_again = recomputed or given.is_shared
        leaves, watched = list(given.leaves), list[Entered]()
        by_leaf: dict[int, Tensor] = {}  # id of a leaf -> what enters for it; several leaves may be one tensor
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in by_leaf:
                fixed = given.fixed.get(number, "")
                tensor = leaf.clone() if clones and not fixed else leaf
                before = (leaf.clone() if fixed else leaf) if look and (fixed or clones) else None
                if number in given.wants_gradient:
                    tensor = through_gate(self._anchor, tensor, sink, number)
                elif tensor is leaf:  # views of one batch share a version counter; `.data` gives each its own
                    tensor = leaf.data
                by_leaf[id(leaf)] = tensor
                if is_read_again or fixed:
                    watched.append(Entered(tensor, tensor._version, fixed, before, clones))
            leaves[number] = by_leaf[id(leaf)]
        if self._has_loss and (recomputed or given.fixed_target):
            target = given.target
            for number, leaf in enumerate([target] if isinstance(target, Tensor) else pytree.tree_leaves(target)):
                if isinstance(leaf, Tensor) and (recomputed or number in given.fixed_target):
                    fixed = given.fixed_target.get(number) or _TARGET_READ_AGAIN.format(number)
                    watched.append(Entered(leaf, leaf._version, fixed, leaf.clone() if look else None, False))
        return leaves[0] if given.spec.is_leaf() else pytree.tree_unflatten(leaves, given.spec), watched

    def check(self, entered: Sequence[Entered]) -> None:
        """Called after the layers have run. Raises SavedTensorChanged: they changed in place a tensor that something else reads."""
        self._is_known = True
        for tensor, version, fixed, before, is_clone in entered:
            if tensor._version == version and (before is None or same_values(tensor.detach(), before)):
                continue
            if fixed:
                layers = f"{self._name_of(0)} to {self._name_of(self._last)}"
                raise input_changed(f"{self._title}, from {layers}, changes in place: {fixed}")
            if not is_clone:
                raise input_changed(
                    f"{self._name_of(0)} changes the input of {self._title} in place, which it did not on its first microbatch, "
                    "so that R would see another input"
                )
            self._clones = True


_TARGET_READ_AGAIN = "leaf {} of its target, which loss_fn gets a second time when it is recomputed"


# Kept layers ----------------------------------------------------------------------------------------------------------


class Passed(NamedTuple):
    """A copy of a kept layer's output, from which R continues: the leaves of its tree, and which of them need a gradient."""

    leaves: list[Any]
    requires_grad: list[bool]
    spec: pytree.TreeSpec

    @staticmethod
    def of(output: Any) -> Passed:
        """Copies the output, because the next layer may change it in place."""
        leaves, spec = pytree.tree_flatten(output)
        copies = {id(leaf): copy_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        return Passed([copies.get(id(leaf), leaf) for leaf in leaves], requires_grad, spec)

    def again(self, anchor: Tensor) -> Any:
        """The copy as the next layer's input in R. The same leaves need a gradient as in F, since autograd saves tensors accordingly."""
        pairs = zip(self.leaves, self.requires_grad)
        leaves = [through_gate(anchor, leaf) if requires_grad else leaf for leaf, requires_grad in pairs]
        return pytree.tree_unflatten(leaves, self.spec)
