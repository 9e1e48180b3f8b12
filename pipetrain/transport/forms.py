"""The form of a message between stages: shapes, dtypes, strides, and which tensors need a gradient.

The form travels with the first message of its kind; afterwards both ends know it, so that a receive can be posted ahead
with the right size and nothing but the tensors' own bytes is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.group.failure import PipelineError


@dataclass(frozen=True)
class TensorForm:
    """One tensor. A stride of 0 is an expanded dimension, of which one entry is sent."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    needs_gradient: bool

    def empty(self, device: torch.device) -> Tensor:
        """A buffer for what is sent: as `compact` lays it out."""
        sizes = [1 if stride == 0 else size for size, stride in zip(self.shape, self.strides)]
        return torch.empty_strided(sizes, self.strides, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class Form:
    """A tree of tensors and plain values: `leaves` holds a `TensorForm` or the value itself."""

    spec: str
    leaves: tuple[Any, ...]

    def to_json(self) -> bytes:
        leaves = [{"tensor": asdict(leaf)} if isinstance(leaf, TensorForm) else {"value": leaf} for leaf in self.leaves]
        return json.dumps({"spec": self.spec, "leaves": leaves}).encode()

    @staticmethod
    def from_json(text: bytes) -> Form:
        record = json.loads(text)
        leaves = [
            TensorForm(
                shape=tuple(leaf["tensor"]["shape"]),
                strides=tuple(leaf["tensor"]["strides"]),
                dtype=leaf["tensor"]["dtype"],
                needs_gradient=leaf["tensor"]["needs_gradient"],
            )
            if "tensor" in leaf
            else leaf["value"]
            for leaf in record["leaves"]
        ]
        return Form(record["spec"], tuple(leaves))


def compact(tensor: Tensor) -> Tensor:
    """`tensor` with one entry per expanded dimension and memory without gaps: itself where it is so, else a copy."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor if _is_dense(tensor) else tensor.clone()


def form_of(leaves: Sequence[Any], compacted: Sequence[Any], needs_gradient: Sequence[bool], spec: str) -> Form:
    """The form of a message: `compacted[i]` is `compact(leaves[i])` for a tensor."""
    forms: list[Any] = []
    for leaf, dense, needed in zip(leaves, compacted, needs_gradient):
        if isinstance(leaf, Tensor):
            strides = tuple(
                0 if full != sent else stride for full, sent, stride in zip(leaf.shape, dense.shape, dense.stride())
            )
            forms.append(TensorForm(tuple(leaf.shape), strides, str(leaf.dtype).removeprefix("torch."), needed))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            forms.append(leaf)
        else:
            raise TypeError(
                f"a layer at the end of a stage returned a {type(leaf).__name__}: stages exchange (nested) tuples, lists "
                "and dicts of tensors, numbers, strings and None"
            )
    return Form(spec, tuple(forms))


def conform(leaves: Sequence[Any], form: Form, found: Form, device: torch.device, what: str) -> list[Any]:
    """`leaves`, of the form `found`, laid out as the other end expects: only strides and missing gradients may differ.

    Raises:
        PipelineError: another shape, dtype or structure, although the inputs of the step had the shapes of an earlier one.
    """
    fits = len(leaves) == len(form.leaves) and found.spec == form.spec
    laid_out = []
    for leaf, expected, actual in zip(leaves, form.leaves, found.leaves):
        if isinstance(expected, TensorForm):
            fits = fits and (actual is None or _fits(expected, actual))
            laid_out.append(_restride(leaf, expected, device) if fits else None)
        else:
            fits = fits and actual == expected
            laid_out.append(leaf)
    if not fits:
        raise PipelineError(
            f"{what}: what the stage sends changed its form although the step's inputs have the shapes of an earlier step: "
            f"then {list(form.leaves)}, now {list(found.leaves)}. What stages exchange may depend on the inputs' shapes only"
        )
    return laid_out


def unpack(form: Form, buffers: Sequence[Tensor]) -> list[Any]:
    """The leaves of a received message."""
    tensors = iter(buffers)
    return [next(tensors).expand(leaf.shape) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves]


@lru_cache(maxsize=64)
def spec_text(spec: pytree.TreeSpec) -> str:
    """`Form.spec` of a tree's structure."""
    return pytree.treespec_dumps(spec)


@lru_cache(maxsize=64)
def structure(spec: str) -> pytree.TreeSpec:
    """The structure of a tree, from `Form.spec`."""
    return pytree.treespec_loads(spec)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor in one dimension: what a transport that wants contiguous tensors sends."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _fits(expected: TensorForm, actual: Any) -> bool:
    if not isinstance(actual, TensorForm) or (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    # What was one entry of an expanded dimension may not become many; the other way round a copy spreads it.
    return all(wanted != 0 or stride == 0 for wanted, stride in zip(expected.strides, actual.strides))


def _restride(leaf: Tensor | None, form: TensorForm, device: torch.device) -> Tensor:
    buffer = form.empty(device)
    if leaf is None:  # no gradient where the first step had one
        return buffer.zero_()
    for dimension, stride in enumerate(form.strides):
        if stride == 0:
            leaf = leaf.narrow(dimension, 0, 1)
    return buffer.copy_(leaf)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
