"""What may go from stage to stage: dense tensors and plain values; errors name all else. And which tensors share memory."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.forms import is_plain, leaf_names, spec_text

# Of numpy's search for an entry in common; beyond it two views count as overlapping.
_MOST_WORK = 10_000


def cross(
    leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device, giver: str, fixed: Mapping[int, str]
) -> tuple[list[Any], dict[int, str]]:
    """The leaves of a stage's output as the next stage gets them, and which of them it may not change in place, and why.

    A lazy conjugate or negation is carried out: bytes do not tell of it. `giver` names the stage's last layer in an error; `fixed` are
    memories (by the identity of their storage) that nobody may change in place.

    Raises TypeError: what cannot cross, by its place in the tree, and what to return instead.
    """
    for number, leaf in enumerate(leaves):
        if fault := _fault(leaf, device):
            raise TypeError(f"{giver} returned {leaf_names(spec, 'output')[number]} as {fault}")
    if not spec.is_leaf():
        try:
            spec_text(spec)
        except TypeError as error:
            raise TypeError(f"{giver} returned {error}") from None
    may_not_change = {}
    if fixed:
        storages = {n: leaf.untyped_storage()._cdata for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        may_not_change = {n: fixed[storage] for n, storage in storages.items() if storage in fixed}
    if len(leaves) > 1 and (overlaps := overlapping(leaves)):
        names = leaf_names(spec, "output")
        for number, other in overlaps.items():
            may_not_change.setdefault(
                number,
                f"{names[number]} of {giver} which looks into the memory of {names[other]}: clone one of them there",
            )
    return _resolved(leaves), may_not_change


def memories(leaves: Sequence[Any], fixed: Mapping[int, str]) -> dict[int, str]:
    """What of a stage's input may not be changed in place, for `cross`: the identities of storages, and why."""
    dense = {n: why for n, why in fixed.items() if leaves[n].layout is torch.strided and not leaves[n].is_nested}
    return {leaves[number].untyped_storage()._cdata: why for number, why in dense.items()}


def _resolved(leaves: Sequence[Any]) -> list[Any]:
    """`leaves` with lazy conjugations and negations carried out; two leaves that were one tensor still are."""
    done = {
        id(leaf): leaf.resolve_conj().resolve_neg()
        for leaf in leaves
        if isinstance(leaf, Tensor) and (leaf.is_conj() or leaf.is_neg())
    }
    return [done.get(id(leaf), leaf) for leaf in leaves] if done else list(leaves)


def _fault(leaf: Any, device: torch.device) -> str:
    """What is wrong with a leaf and what to return instead; empty: nothing is."""
    if not isinstance(leaf, Tensor):
        return "" if is_plain(leaf) else _fault_of_value(leaf)
    if type(leaf) not in (Tensor, nn.Parameter):
        kind = type(leaf).__name__
        return f"a {kind}, and other ranks get plain tensors: return the tensors that it is made of, or .as_subclass(torch.Tensor)"
    if leaf.is_nested:
        return "a nested tensor: return its values and offsets, or a padded tensor"
    if leaf.layout is not torch.strided:
        layout = str(leaf.layout).removeprefix("torch.")
        return f"a tensor with the layout {layout}: return its indices and values, or .to_dense()"
    if leaf.is_quantized:
        return "a quantized tensor: return .int_repr() with its scale, or .dequantize()"
    if leaf.device.type != device.type:
        return f"a tensor on {leaf.device}, and the stages are on {device}: return .to({str(device)!r})"
    return ""


def _fault_of_value(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, enum.Enum):
        return f"an enum, {value}: return its .value"
    if dataclasses.is_dataclass(value):
        return f"a {kind}, a dataclass that torch does not look into: return a tuple or dict of its fields"
    if type(value).__module__ == "numpy":
        return f"a numpy {kind}: return .item() or torch.from_numpy(...)"
    return f"a {kind}: stages exchange (nested) tuples, lists and dicts of tensors, numbers, strings and None"


def overlapping(leaves: Sequence[Any]) -> dict[int, int]:
    """The leaves that have entries in common with another one, and which. The same tensor twice is no such case."""
    groups: dict[int, dict[int, int]] = {}  # storage -> tensor -> its first leaf
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            groups.setdefault(leaf.untyped_storage()._cdata, {}).setdefault(id(leaf), number)
    found: dict[int, int] = {}
    for group in groups.values():
        for one, other in itertools.combinations(group.values(), 2):
            if _overlap(leaves[one], leaves[other]):
                found |= {one: other, other: one}
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    try:
        return np.shares_memory(np.asarray(_Addresses(one)), np.asarray(_Addresses(other)), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """The memory of a tensor on any device, for numpy, which compares addresses and reads none."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }
