"""A value that a stage's first layer makes for the other layers of this stage. It is not sent to other stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class StageLocal:
    """Holds any value, as one leaf of the tree that goes from layer to layer. In the output of a stage, None replaces it.

    The runtime does not look into it: its tensors are neither sent nor stashed, and get no gradient. Tensors in it that autograd saves
    belong to the activation set, and count once, even if several layers save them. They are freed at the end of F if R will run, else
    after B. A layer that gets None instead of a `StageLocal` makes a new one.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def without_local(tree: Any) -> Any:
    """The tree that leaves a stage, with None in place of each `StageLocal`; the same object if there is none."""
    if isinstance(tree, Tensor):
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    if not any(type(leaf) is StageLocal for leaf in leaves):
        return tree
    return pytree.tree_unflatten([None if type(leaf) is StageLocal else leaf for leaf in leaves], spec)
