"""How tensors enter a stage, and whether its layers changed one in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.stage.slots import SavedTensorChanged

if TYPE_CHECKING:
    from pipetrain.stage.stage import StageInput


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


def through_gate(anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor] | None = None, leaf: int = 0) -> Tensor:
    """`tensor` as it enters a graph: it needs a gradient, and is no leaf, as it may be changed in place."""
    return Gate.apply(anchor, tensor, {} if sink is None else sink, leaf)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(slots=True)
class _Entered:
    """One tensor, and its version when it entered.

    `fixed` says what it is and why it may not change; empty: it may. `before` is a copy, or the memory that it was cloned from:
    with it even a change through `.data` is found, which no version tells.
    """

    tensor: Tensor
    version: int
    fixed: str = ""
    before: Tensor | None = None

    def has_changed(self) -> bool:
        if self.tensor._version != self.version:
            return True
        return self.before is not None and not _is_equal(self.tensor.detach(), self.before)


class Entry:
    """The entry of one stage: its layers get a clone of the input once they are known to change it in place, so that the stash stays whole.

    `title` names the stage in an error, `name_of` its layers up to the `last`.
    """

    def __init__(self, anchor: Tensor, title: str, name_of: Callable[[int], str], last: int) -> None:
        self._anchor = anchor
        self._title = title
        self._name_of = name_of
        self._last = last
        self._clones = False
        self._is_known = False  # whether the layers have run once

    def enter(
        self, given: StageInput, sink: dict[int, Tensor], *, recomputed: bool, clone: bool, has_loss: bool
    ) -> tuple[Any, list[_Entered], bool]:
        """The input tree as the first layer gets it, what `check` looks at when the last one has run, and whether it was cloned.

        `recomputed`: an R reads the input again. `clone`: in any case.
        """
        clones = clone or ((recomputed or given.is_shared) and self._clones) or (given.is_shared and not self._is_known)
        # A change through .data is looked for where the layers get a clone for the first time.
        look = not self._is_known or (clones and not self._clones)
        leaves = list(given.leaves)
        entered: dict[int, _Entered] = {}  # by the tensor that was given: it may stand in several leaves
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in entered:
                fixed = given.fixed.get(number, "")
                # A version counter of its own: microbatches are views of one batch and share theirs.
                tensor = leaf.clone() if clones and not fixed else leaf.data
                before = (leaf.clone() if fixed else leaf) if look and (fixed or clones) else None
                if number in given.wants_gradient:
                    tensor = through_gate(self._anchor, tensor, sink, number)
                entered[id(leaf)] = _Entered(tensor, tensor._version, fixed, before)
            leaves[number] = entered[id(leaf)].tensor
        is_read_again = recomputed or given.is_shared
        watched = [one for one in entered.values() if is_read_again or one.fixed]
        if has_loss and (recomputed or given.fixed_target):
            watched += _targets(given, recomputed=recomputed, look=look)
        return pytree.tree_unflatten(leaves, given.spec), watched, clones

    def check(self, entered: Sequence[_Entered], *, cloned: bool) -> None:
        """The layers have run: they may have changed only what nobody else reads.

        Raises:
            SavedTensorChanged
        """
        self._is_known = True
        changed = False
        for one in entered:
            if not one.has_changed():
                continue
            if one.fixed:
                raise SavedTensorChanged(
                    f"{self._title}, from {self._name_of(0)} to {self._name_of(self._last)}, changes in place: {one.fixed}. Use the "
                    "operation that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
                )
            changed = True
        if changed and not cloned:
            raise SavedTensorChanged(
                f"{self._name_of(0)} changes the input of {self._title} in place, which it did not on its first microbatch, so that R "
                "would see another input: use the operation that returns a new tensor"
            )
        self._clones |= changed


def _targets(given: StageInput, *, recomputed: bool, look: bool) -> list[_Entered]:
    """The tensors of a target that `loss_fn` may not change: those that are `fixed`, and all where R will read them again."""
    found = []
    for number, leaf in enumerate(pytree.tree_leaves(given.target)):
        if isinstance(leaf, Tensor) and (recomputed or number in given.fixed_target):
            why = (
                given.fixed_target.get(number)
                or f"leaf {number} of its target, which loss_fn gets a second time when it is recomputed"
            )
            found.append(_Entered(leaf, leaf._version, why, leaf.clone() if look else None))
    return found


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to itself; what has no entries in a row (sparse) is taken for equal."""
    if one.layout is not torch.strided or one.is_nested:
        return True
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
