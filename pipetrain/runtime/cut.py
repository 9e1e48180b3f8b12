"""Checks a batch, cuts it into microbatches along dimension 0, leaf by leaf, and weights each microbatch in the loss."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any  # a tensor, or (nested) tuples, lists and dicts of tensors and plain values


@dataclass(frozen=True, eq=False)
class Whole:
    """Marks a leaf whose dimension 0 is not the batch (positions, a shared mask): every microbatch gets all of it."""

    value: Any


def whole_tensors(batch: Tree, name: str) -> dict[int, str]:
    """Return leaf index -> a text for an error, for each tensor in a `Whole`. Indices count the leaves of a microbatch."""
    found, index = dict[int, str](), 0
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Whole):
            index += 1
            continue
        for inner, value in pytree.tree_flatten_with_path(leaf.value)[0]:
            if isinstance(value, Tensor):
                full = name + pytree.keystr(path) + pytree.keystr(inner)
                found[index] = f"{full}, which is Whole: every microbatch gets the very same tensor"
            index += 1
    return found


def num_rows(batch: Tree, name: str) -> int | None:
    """Return the number of rows of a batch: the size of dimension 0 of its tensors; None if no tensor of it is cut. Raises ValueError:
    tensors disagree, or one has no dimension 0."""
    rows: int | None = None
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            continue
        place = name + pytree.keystr(path)
        if leaf.dim() == 0:
            raise ValueError(
                f"{place} is a tensor without dimensions and cannot be cut: wrap it in pipetrain.Whole(...)"
            )
        if rows is not None and leaf.shape[0] != rows:
            raise ValueError(
                f"{place} has {leaf.shape[0]} rows, the tensors before it {rows}: give all the same number; wrap what is not per row in "
                "pipetrain.Whole(...); pad rows that are packed into one tensor, as EmbeddingBag with offsets takes them"
            )
        rows = leaf.shape[0]
    return rows


def cut(batch: Tree, num_microbatches: int, name: str = "inputs") -> list[Tree]:
    """Cut `batch` into `num_microbatches` slices by `torch.tensor_split`; plain values and `Whole` leaves go to each slice. Raises
    ValueError: fewer rows than microbatches, or tensors that disagree on the number of rows."""
    rows = num_rows(batch, name)
    if rows is not None and rows < num_microbatches:
        raise ValueError(
            f"{name} has {rows} rows, fewer than num_microbatches={num_microbatches}: "
            f"give at least {num_microbatches} rows or set num_microbatches={max(rows, 1)}"
        )
    return slices(batch, num_microbatches, lambda tensor: tensor)


def slices(batch: Tree, num_microbatches: int, bring: Callable[[Tensor], Tensor]) -> list[Tree]:
    """The same as `cut`, for a batch that was checked before. `bring` is applied to its tensors, also to those in `Whole`."""
    leaves, spec = pytree.tree_flatten(batch)
    columns = list[Sequence[Any]]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            columns.append(torch.tensor_split(bring(leaf), num_microbatches))
        else:
            columns.append(
                [pytree.tree_map_only(Tensor, bring, leaf.value) if isinstance(leaf, Whole) else leaf]
                * num_microbatches
            )
    rows = list(zip(*columns)) or [()] * num_microbatches
    return list(map(pytree.tree_unflatten, rows, itertools.repeat(spec)))


def own_rows(batch: Tree, replica: int, num_replicas: int, num_microbatches: int) -> Tree:
    """Return the rows of one replica: its `num_microbatches` slices. If the batch has fewer rows than slices, each replica gets one of
    num_replicas slices. Raises ValueError: fewer rows than replicas, or tensors that disagree on the number of rows."""
    rows = num_rows(batch, "the batch")
    if num_replicas == 1 or rows is None:
        return batch
    if rows < num_replicas:
        raise ValueError(f"the batch has {rows} rows, fewer than num_replicas={num_replicas}: each replica needs one")
    of_each = num_microbatches if rows >= num_replicas * num_microbatches else 1
    counts = row_counts(rows, num_replicas * of_each)
    start, end = (sum(counts[: number * of_each]) for number in (replica, replica + 1))
    return pytree.tree_map(lambda leaf: leaf[start:end] if isinstance(leaf, Tensor) else leaf, batch)


def join(outputs: Sequence[Tree]) -> Tree:
    """Join the outputs of all microbatches into one batch: tensors along dimension 0; of other leaves, the first microbatch's is taken."""
    spec = pytree.tree_structure(outputs[0])
    columns = zip(*(pytree.tree_leaves(output) for output in outputs))
    return pytree.tree_unflatten(
        [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns], spec
    )


def weights_of(counts: Sequence[int | float]) -> list[float]:
    """Return the weight of each microbatch in the loss: n_i / N, its part of the batch's count. Raises ValueError: all counts are 0, one is
    negative, or their sum is not finite."""
    total = sum(counts)
    if not 0 < total < math.inf or min(counts) < 0:
        raise ValueError(
            f"count_fn gave {list(counts)} over the microbatches: counts must be 0 or more, not all 0, and have a finite sum"
        )
    return [count / total for count in counts]


def rows_fault(found: int | None, rows: int) -> str | None:
    """Return why targets of `found` rows (None: no target tensor is cut) do not fit inputs of `rows` rows; None if they fit."""
    if found is None or found == rows:
        return None
    return f"targets have {found} rows on the last rank, inputs {rows} on the first"


def row_counts(rows: int, num_microbatches: int) -> list[int]:
    """Return the number of rows of each microbatch, as `torch.tensor_split` cuts them."""
    share, rest = divmod(rows, num_microbatches)
    return [share + (number < rest) for number in range(num_microbatches)]


@functools.lru_cache(maxsize=64)
def shares_of_rows(rows: int, num_microbatches: int) -> tuple[float, ...]:
    """Return each microbatch's share of the rows."""
    return tuple(weights_of(row_counts(rows, num_microbatches)))


# Mistakes in a batch --------------------------------------------------------------------------------------------------------------


def checked_rows(batch: Tree, name: str, *, with_graph: bool, rows_of_inputs: int | None = None) -> int | None:
    """Return `num_rows` of the inputs or targets of a batch. Raises ValueError: as `num_rows`, or for an obvious mistake; it names the leaf
    and what to give instead."""
    rows: int | None = None
    for leaf in pytree.tree_leaves(batch):
        # Most leaves are ordinary tensors that need no gradient, and such a leaf needs no other check.
        is_plain = (
            type(leaf) is Tensor and leaf.layout is torch.strided and not (leaf.requires_grad or leaf.is_inference())
        )
        if not is_plain or not leaf.dim() or rows not in (None, len(leaf)):
            break
        rows = len(leaf)
    else:
        return rows
    is_of_inputs = rows_of_inputs is None
    rows = num_rows(batch, name) if is_of_inputs else None
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        complaint = _complaint(leaf, with_graph)
        if complaint is not None:
            raise ValueError(f"{name}{pytree.keystr(path)} {complaint}")
    if (length := rows if is_of_inputs else rows_of_inputs) is not None:
        _refuse_lists(batch, name, length)
    return rows if is_of_inputs else num_rows(batch, name)


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
    """Return why a step cannot take a tensor that evaluation can take; None if it can."""
    if with_graph and tensor.requires_grad:
        return (
            "requires a gradient: a step gives gradients to the layers' parameters only, so this one would get none. Give it as "
            ".detach(), or move its computation into the first layer"
        )
    if with_graph and tensor.is_inference():
        return "was made under torch.inference_mode(), so nothing can be trained on it: give its .clone()"
    return None


def _refuse_lists(batch: Any, name: str, rows: int) -> None:
    """Refuse a list with one plain value per row: it looks like a batch, but each microbatch would get all of it."""

    def is_list_of_rows(part: Any) -> bool:
        is_long = isinstance(part, list) and len(part) == rows > 1
        return is_long and all(isinstance(entry, (bool, int, float, complex, str)) for entry in part)

    for path, part in pytree.tree_flatten_with_path(batch, is_leaf=is_list_of_rows)[0]:
        if is_list_of_rows(part):
            raise ValueError(
                f"{name}{pytree.keystr(path)} is a list of {rows} plain values, as many as the batch has rows, and is not cut: give "
                "torch.tensor(...), or pipetrain.Whole(...) if each microbatch needs all of it"
            )


# What counts ----------------------------------------------------------------------------------------------------------

CountFn = Callable[[Any], Any]
"""Returns how much of a microbatch's target counts in the loss: a number, 0 or more."""


def counts_of(targets: Sequence[Any], count_fn: CountFn) -> list[int | float]:
    """Call `count_fn` on the target of each microbatch. Raises ValueError, which names the microbatch: the call fails, or does not return a
    finite number of 0 or more."""
    return [_count(number, target, count_fn) for number, target in enumerate(targets)]


def is_number(value: Any) -> bool:
    """Whether `value` is a plain number: not a bool, a text or a tensor."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _count(microbatch: int, target: Any, count_fn: CountFn) -> int | float:
    try:
        found = count_fn(target)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"count_fn failed on the target of microbatch {microbatch}: {reason}") from error
    value: Any = found.item() if isinstance(found, Tensor) and found.dim() == 0 else found
    if is_number(value) and 0 <= value < math.inf:  # a bool is most likely any() in place of sum()
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) and found.dim() else repr(found)
    raise ValueError(
        f"count_fn gave {shown} for the target of microbatch {microbatch}: it must return how much of it counts in the "
        "loss, an int, a float or a 0-dim tensor, finite and 0 or more"
    )


@dataclass(frozen=True)
class Counted:
    """Rows and counts of the targets of a call, from the rank of the last stage. If `problem` is set, the counts have no meaning."""

    rows: int | None = None  # of the targets; None if no target tensor is cut
    counts: tuple[int | float, ...] = ()
    problem: ValueError | TypeError | None = None


def count_targets(targets: Any, most_microbatches: int, count_fn: CountFn, *, all_of_them: bool) -> Counted:
    """Cut the targets of a call into `most_microbatches` and count each. If they have fewer rows, cut one microbatch per row; with
    `all_of_them`, return a `problem` instead."""
    rows = None
    try:
        rows = num_rows(targets, "targets")
        wanted = most_microbatches if all_of_them or rows is None else max(1, min(most_microbatches, rows))
        counts = counts_of(cut(targets, wanted, "targets"), count_fn)
    except (ValueError, TypeError) as problem:
        return Counted(rows, problem=problem)
    return Counted(rows, tuple(counts))
