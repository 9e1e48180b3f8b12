"""What a layer may not do, as errors that name it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import GradientEdge, Node

Signature = tuple[torch.Size, torch.dtype, type]  # of a saved tensor: the last is the class of the node that made it


class RecomputeMismatch(RuntimeError):
    """R did not do what F did."""


class SavedTensorChanged(RuntimeError):
    """A tensor was changed in place after it had been saved for backward."""


class LayerRefused(RuntimeError):
    """A layer does in its forward what no stage can give it; the message says what to do."""


class StateChanged(RuntimeError):
    """A forward changes something that a recompute can neither see as it was nor leave as it is."""


_INSTEAD = "use the operation that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
# What torch.func says where saved-tensor hooks are in force.
_FUNCTORCH_REFUSES = "don't yet support saved tensor hooks"
# What torch says, who looks by itself where there are no hooks.
_CHANGED_IN_PLACE = "modified by an inplace operation"


def refuses_hooks(error: BaseException) -> bool:
    """Whether torch.func has raised this since saved-tensor hooks are in force."""
    return isinstance(error, RuntimeError) and _FUNCTORCH_REFUSES in str(error)


def input_changed(what: str) -> SavedTensorChanged:
    """`what` says who changes which input in place."""
    return SavedTensorChanged(f"{what}: {_INSTEAD}")


def saved_changed(where: str, shape: torch.Size, when: str, by: str = "") -> SavedTensorChanged:
    """`where` names the layer, `by` the operation that saved the tensor."""
    tensor = f"a tensor saved for backward by {by}" if by else f"a tensor {list(shape)} saved for backward"
    return SavedTensorChanged(f"{where}: {tensor} was changed in place {when}. Its gradient would be wrong: {_INSTEAD}")


def changed_node(roots: Iterable[GradientEdge]) -> Node | None:
    """The first node below `roots` with a saved tensor that was changed in place. A backward without hooks must not have passed it."""
    todo, walked = [root.node for root in roots], set[Node]()
    while todo:
        node = todo.pop()
        if node in walked:
            continue
        walked.add(node)
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError as error:  # also of what the backward has let go of, with another text
                    if _CHANGED_IN_PLACE in str(error):
                        return node
        todo.extend(following for following, _ in node.next_functions if following is not None)
    return None


def as_text(signature: Signature) -> str:
    """A saved tensor in an error."""
    shape, dtype, node = signature
    made = "" if node is type(None) else f" made by {node.__name__.removesuffix('0')}"
    return f"a tensor {list(shape)} {str(dtype).removeprefix('torch.')}{made}"


def mismatch(layer: str, what: str) -> RecomputeMismatch:
    """`what` R of a layer does that F did not."""
    return RecomputeMismatch(
        f"{layer}: the recompute {what}. A layer that is recomputed must do the same operations on the same "
        "values both times: look for a counter, a cache, random numbers of its own or other state of the layer that F "
        "changes, or name it in recompute.keep_layers"
    )
