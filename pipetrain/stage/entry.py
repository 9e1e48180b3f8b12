"""How tensors enter a stage, and whether its layers changed one in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.stage.errors import input_changed

if TYPE_CHECKING:
    from pipetrain.stage.microbatch import StageInput


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


# What `Gate.apply` comes down to where no transform of torch.func is in force, as none is around a stage: half of its time.
_apply = super(torch.autograd.Function, Gate).apply


def through_gate(anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor] | None = None, leaf: int = 0) -> Tensor:
    """`tensor` as it enters a graph: it needs a gradient, and is no leaf, as it may be changed in place."""
    return _apply(anchor, tensor, {} if sink is None else sink, leaf)  # type: ignore[no-any-return, no-untyped-call]


class Entered(NamedTuple):
    """One tensor, and its version when it entered.

    `fixed` says what it is and why it may not change; empty: it may. `before` is a copy of it, or the leaf that it was cloned from.
    It shows changes through `.data`, which versions do not. `is_clone`: unless fixed, it is a clone of a leaf that the stage holds.
    """

    tensor: Tensor
    version: int
    fixed: str
    before: Tensor | None
    is_clone: bool


class Entry:
    """The entry of one stage: its layers get a clone of the input once they are known to change it in place, so that the stash stays whole.

    `title` names the stage in an error, `name_of` its layers up to the `last`.
    """

    def __init__(self, anchor: Tensor, title: str, name_of: Callable[[int], str], last: int, *, has_loss: bool) -> None:
        self._anchor = anchor
        self._title = title
        self._name_of = name_of
        self._last = last
        self._has_loss = has_loss
        self._clones = False
        self._is_known = False  # whether the layers have run once

    def enter(
        self, given: StageInput, sink: dict[int, Tensor], *, recomputed: bool, clone: bool = False
    ) -> tuple[Any, list[Entered]]:
        """The input tree as the first layer gets it, and what `check` looks at when the last one has run.

        `recomputed`: an R reads the input again. `clone`: in any case.
        """
        clones = clone or ((recomputed or given.is_shared) and self._clones) or (given.is_shared and not self._is_known)
        # A change through .data is looked for where the layers get a clone for the first time.
        look = not self._is_known or (clones and not self._clones)
        is_read_again = recomputed or given.is_shared
        leaves, watched = list(given.leaves), list[Entered]()
        by_leaf: dict[int, Tensor] = {}  # what was given -> what enters: it may stand in several leaves
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in by_leaf:
                fixed = given.fixed.get(number, "")
                # A version counter of its own: microbatches are views of one batch and share theirs.
                tensor = leaf.clone() if clones and not fixed else leaf.data
                before = (leaf.clone() if fixed else leaf) if look and (fixed or clones) else None
                if number in given.wants_gradient:
                    tensor = through_gate(self._anchor, tensor, sink, number)
                by_leaf[id(leaf)] = tensor
                if is_read_again or fixed:
                    watched.append(Entered(tensor, tensor._version, fixed, before, clones))
            leaves[number] = by_leaf[id(leaf)]
        if self._has_loss and (recomputed or given.fixed_target):
            for number, leaf in enumerate(pytree.tree_leaves(given.target)):
                if isinstance(leaf, Tensor) and (recomputed or number in given.fixed_target):
                    fixed = given.fixed_target.get(number) or _TARGET_READ_AGAIN.format(number)
                    watched.append(Entered(leaf, leaf._version, fixed, leaf.clone() if look else None, False))
        return pytree.tree_unflatten(leaves, given.spec), watched

    def check(self, entered: Sequence[Entered]) -> None:
        """Check after the layers have run: they may have changed in place only tensors that nothing else reads. Raises SavedTensorChanged."""
        self._is_known = True
        for tensor, version, fixed, before, is_clone in entered:
            if tensor._version == version and (before is None or _is_equal(tensor.detach(), before)):
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


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to itself; what has no entries in a row (sparse) is taken for equal."""
    if one.layout is not torch.strided or one.is_nested:
        return True
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
