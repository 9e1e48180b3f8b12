"""What of a batch would not be cut, or would lose its gradient, without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.runtime.cut import Whole


def check_batch(batch: Any, name: str, rows: int | None, *, with_graph: bool) -> None:
    """Refuse what is surely a mistake in the inputs or targets of a batch of so many `rows`.

    Raises:
        ValueError: with the leaf, and what to give instead.
    """
    if all(map(_is_plain, pytree.tree_leaves(batch))):
        return
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        complaint = _complaint(leaf, with_graph)
        if complaint is not None:
            raise ValueError(f"{name}{pytree.keystr(path)} {complaint}")
    if rows is not None:
        _refuse_lists(batch, name, rows)


def _is_plain(leaf: Any) -> bool:
    """What the leaves of most batches are."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.requires_grad and not leaf.is_inference()


def _complaint(leaf: Any, with_graph: bool) -> str | None:
    if isinstance(leaf, Whole):
        inner = [part for part in pytree.tree_leaves(leaf.value) if isinstance(part, Tensor)]
        return next((f"(Whole) {said}" for part in inner if (said := _untrainable(part, with_graph))), None)
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            return f"is a tensor of layout {leaf.layout}, which cannot be cut: give it dense, or wrap it in pipetrain.Whole(...)"
        return _untrainable(leaf, with_graph)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
    if hasattr(leaf, "__array__") and getattr(leaf, "ndim", True):
        return f"is a {kind}, which is not cut: give a tensor, such as torch.from_numpy(...) makes, or wrap it in pipetrain.Whole(...)"
    parts = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    if any(isinstance(part, Tensor) for part in parts.values()):
        return f"is a {kind} with tensors in it, which are not cut: give a dict or a tuple of them, or wrap it in pipetrain.Whole(...)"
    return None


def _untrainable(tensor: Tensor, with_graph: bool) -> str | None:
    """Why a step cannot take a tensor that evaluation can."""
    if with_graph and tensor.requires_grad:
        return (
            "requires a gradient: a step gives gradients to the layers' parameters only, so this one would get none. Give it as "
            ".detach(), or make what computes it the first layer"
        )
    if with_graph and tensor.is_inference():
        return "was made under torch.inference_mode(), so nothing can be trained on it: give its .clone()"
    return None


def _refuse_lists(batch: Any, name: str, rows: int) -> None:
    """A list of plain values with one for each row looks like a batch, and would go to each microbatch as a whole."""

    def is_list_of_rows(part: Any) -> bool:
        return (
            isinstance(part, list)
            and len(part) == rows > 1
            and all(isinstance(entry, (bool, int, float, complex, str)) for entry in part)
        )

    for path, part in pytree.tree_flatten_with_path(batch, is_leaf=is_list_of_rows)[0]:
        if is_list_of_rows(part):
            raise ValueError(
                f"{name}{pytree.keystr(path)} is a list of {rows} plain values, as many as the batch has rows, and is not cut: give "
                "torch.tensor(...), or pipetrain.Whole(...) where each microbatch needs all of it"
            )
