"""Errors for what a layer may not do; each names the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge, Node

from pipetrain.stage.leaves import nodes_below

if TYPE_CHECKING:
    from pipetrain.stage.slots import LateBoundSet

Signature = tuple[torch.Size, torch.dtype, type]  # of a saved tensor; the type is the class of the node that made it


class RecomputeMismatch(RuntimeError):
    """R did not do what F did."""


class SavedTensorChanged(RuntimeError):
    """A tensor was changed in place after it had been saved for backward."""


class LayerRefused(RuntimeError):
    """A layer's forward needs something that its stage lacks, such as a gradient through another stage. The message says what to do."""


class StateChanged(RuntimeError):
    """A forward changes a buffer, a parameter or a module, so that a later R or B would read another value than F did."""


LOSS_WITHOUT_GRADIENT = (
    "loss_fn returned a loss that needs no gradient, although parameters of the model do: a layer or loss_fn cuts it off from them, as "
    "detach(), argmax(), item() and torch.no_grad() do. Use operations that have a gradient, or `evaluate` for a loss without one"
)
_INSTEAD = "use the operation that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
# What torch.func says where saved-tensor hooks are in force.
_FUNCTORCH_REFUSES = "don't yet support saved tensor hooks"
# What torch.autograd.grad says if its outputs do not depend on a tensor.
_NOT_IN_THE_GRAPH = "appears to not have been used in the graph"
# What autograd says of a saved tensor that was changed in place. It checks this only for tensors saved without hooks.
_CHANGED_IN_PLACE = "modified by an inplace operation"


def refuses_hooks(error: BaseException) -> bool:
    """Whether torch.func raised this because saved-tensor hooks are in force."""
    return isinstance(error, RuntimeError) and _FUNCTORCH_REFUSES in str(error)


def refuse_gradient_inside(
    late: LateBoundSet,
    name_of: Callable[[int], str],
    layer: int,
    error: BaseException | None = None,
    cut_before: tuple[str, str, str] | None = None,
) -> None:
    """Raise LayerRefused if the layer took a gradient in its forward that its stage cannot give; `error` is what it raised, if anything.
    `cut_before`: the stage's or part's title, the word `stage` or `part`, and advice. None: the input of the stage needs no gradient."""
    name = name_of(layer)
    if late.wanted is not None and (late.wanted != layer or layer in late.free):
        raise LayerRefused(
            f"{name} takes a gradient through {name_of(late.wanted)} inside its forward, but the saved tensors of that layer were not "
            "kept: recompute.verify=first (the default) keeps a layer that does so in its first microbatch; for any other use "
            "recompute.mode=never"
        ) from None
    is_refused = late.wanted is not None or late.hooks_refused or (error is not None and refuses_hooks(error))
    if is_refused and layer not in late.free:
        raise LayerRefused(
            f"{name} takes a gradient inside its forward, which it did not on its first microbatch: name it in "
            "recompute.keep_layers, or use recompute.mode=never"
        ) from None
    if cut_before is not None and isinstance(error, RuntimeError) and _NOT_IN_THE_GRAPH in str(error):
        title, kind, instead = cut_before
        raise LayerRefused(
            f"{name} takes, inside its forward, a gradient with respect to a tensor outside of the graph of {title}: "
            f"if the gradient goes through a layer of the previous {kind}, {instead}"
        ) from error


def input_changed(what: str) -> SavedTensorChanged:
    """The error for an input that was changed in place. `what` says by whom, and which input."""
    return SavedTensorChanged(f"{what}: {_INSTEAD}")


def saved_changed(where: str, shape: torch.Size, when: str, by: str = "") -> SavedTensorChanged:
    """The error for a changed saved tensor. `where` names the layer, `by` the operation that saved the tensor."""
    tensor = f"a tensor saved for backward by {by}" if by else f"a tensor {list(shape)} saved for backward"
    return SavedTensorChanged(f"{where}: {tensor} was changed in place {when}. Its gradient would be wrong: {_INSTEAD}")


def changed_node(roots: Iterable[GradientEdge]) -> Node | None:
    """The first node below `roots` with a saved tensor that was changed in place, in a graph that has no hooks and is not freed yet."""
    for node in nodes_below([root.node for root in roots], set()):
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError as error:  # with any other text, the backward has already freed the node
                    if _CHANGED_IN_PLACE in str(error):
                        return node
    return None


def as_text(signature: Signature) -> str:
    """How an error describes a saved tensor."""
    shape, dtype, node = signature
    made = "" if node is type(None) else f" made by {node.__name__.removesuffix('0')}"
    return f"a tensor {list(shape)} {str(dtype).removeprefix('torch.')}{made}"


def mismatch(layer: str, what: str) -> RecomputeMismatch:
    """The error if R of `layer` did `what`, unlike F."""
    return RecomputeMismatch(
        f"{layer}: the recompute {what}. A layer that is recomputed must do the same operations on the same "
        "values both times: look for a counter, a cache, random numbers of its own or other state of the layer that F "
        "changes, or name it in recompute.keep_layers"
    )
