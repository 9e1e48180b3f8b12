"""Cuts a batch into microbatches along dimension 0, leaf by leaf, and weights each microbatch in the loss."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
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


def on_device(batch: Tree, bring: Callable[[Tensor], Tensor]) -> Tree:
    """`batch` with `bring` applied to its tensors, also to those in `Whole`."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Whole):
            return Whole(on_device(leaf.value, bring))
        return bring(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(moved, batch)


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
    return slices(batch, num_microbatches)


def slices(batch: Tree, num_microbatches: int) -> list[Tree]:
    """The same as `cut`, for a batch that was checked before."""
    leaves, spec = pytree.tree_flatten(batch)
    columns: list[Sequence[Any]] = [
        torch.tensor_split(leaf, num_microbatches)
        if isinstance(leaf, Tensor)
        else [leaf.value if isinstance(leaf, Whole) else leaf] * num_microbatches
        for leaf in leaves
    ]
    rows = list(zip(*columns)) or [()] * num_microbatches
    return [pytree.tree_unflatten(row, spec) for row in rows]


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


def cut_targets(targets: Tree, rows: int, num_microbatches: int) -> list[Tree]:
    """Cut the targets into microbatches. Raises ValueError: they do not have as many rows as the inputs, which have `rows`."""
    fault = rows_fault(num_rows(targets, "targets"), rows)
    if fault:
        raise ValueError(fault)
    return slices(targets, num_microbatches)


def rows_fault(found: int | None, rows: int) -> str | None:
    """Return why targets of `found` rows (None: no target tensor is cut) do not fit inputs of `rows` rows; None if they fit."""
    if found is None or found == rows:
        return None
    return f"targets have {found} rows on the last rank, inputs {rows} on the first"


def row_counts(rows: int, num_microbatches: int) -> list[int]:
    """Return the number of rows of each microbatch, as `torch.tensor_split` cuts them."""
    share, rest = divmod(rows, num_microbatches)
    return [share + (number < rest) for number in range(num_microbatches)]


# What counts ----------------------------------------------------------------------------------------------------------

CountFn = Callable[[Any], Any]
"""Returns how much of a microbatch's target counts in the loss: a number, 0 or more."""


def counts_of(targets: Sequence[Any], count_fn: CountFn) -> list[int | float]:
    """Call `count_fn` on the target of each microbatch. Raises ValueError, which names the microbatch: the call fails, or does not return a
    finite number of 0 or more."""
    return [_count(number, target, count_fn) for number, target in enumerate(targets)]


def _count(microbatch: int, target: Any, count_fn: CountFn) -> int | float:
    try:
        found = count_fn(target)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"count_fn failed on the target of microbatch {microbatch}: {reason}") from error
    value: Any = found.item() if isinstance(found, Tensor) and found.dim() == 0 else found
    # A bool is a number in Python, but as a count most likely any() in place of sum().
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and 0 <= value < math.inf:
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
