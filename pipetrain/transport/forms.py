"""The form of a message between stages: shapes, dtypes, strides, plain values, and which tensors need a gradient.

The form travels with the first message of its kind; afterwards both ends know it, so that a receive can be posted ahead
with the right size and nothing but the tensors' own bytes is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from pipetrain.group.failure import PipelineError
from pipetrain.transport.structures import leaf_names, structure


@dataclass(frozen=True)
class TensorForm:
    """One tensor. A stride of 0 is an expanded dimension, of which one entry is sent.

    `fixed` says why its receiver may not change it in place; empty: it may.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    needs_gradient: bool
    fixed: str = ""

    @property
    def layout(self) -> tuple[Any, ...]:
        """What a buffer for it depends on."""
        return self.shape, self.strides, self.dtype

    @property
    def num_bytes(self) -> int:
        """Of what is sent."""
        size: int = getattr(torch, self.dtype).itemsize
        return size * math.prod(self._sent_shape)

    @property
    def _sent_shape(self) -> list[int]:
        return [1 if stride == 0 else size for size, stride in zip(self.shape, self.strides)]

    def empty(self, device: torch.device) -> Tensor:
        """A buffer for what is sent: as `compact` lays it out."""
        return torch.empty_strided(self._sent_shape, self.strides, dtype=getattr(torch, self.dtype), device=device)

    def within(self, memory: UntypedStorage) -> Tensor:
        """The same, at the start of `memory`."""
        buffer = torch.empty(0, dtype=getattr(torch, self.dtype), device=memory.device)
        return buffer.set_(memory, 0, self._sent_shape, self.strides)


@dataclass(frozen=True)
class AliasForm:
    """The very tensor that stands in an earlier leaf of the message; it is sent once."""

    leaf: int


@dataclass(frozen=True)
class ValueForm:
    """A plain value as text: 1 and True and 1.0 are different, and NaN is equal to itself."""

    kind: str
    text: str

    def value(self) -> Any:
        return _READ[self.kind](self.text)


_LeafForm = TensorForm | AliasForm | ValueForm


@dataclass(frozen=True)
class Form:
    """A tree of tensors and plain values: `spec` is its structure (empty: a mere list), `leaves` what stands in it."""

    spec: str
    leaves: tuple[_LeafForm, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        """What is sent, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def is_laid_out_as(self, other: Form) -> bool:
        """Whether buffers for a message of one form are buffers for the other."""
        return [tensor.layout for tensor in self.tensors] == [tensor.layout for tensor in other.tensors]

    def name_of(self, number: int) -> str:
        """What a leaf is called in an error."""
        return leaf_names(structure(self.spec), "output")[number] if self.spec else f"the gradient of leaf {number}"

    def to_json(self) -> bytes:
        leaves = [{type(leaf).__name__: asdict(leaf)} for leaf in self.leaves]
        return json.dumps({"spec": self.spec, "leaves": leaves}).encode()

    @staticmethod
    def from_json(text: bytes) -> Form:
        record = json.loads(text)
        return Form(record["spec"], tuple(_leaf_form(**leaf) for leaf in record["leaves"]))


def _leaf_form(**record: Mapping[str, Any]) -> _LeafForm:
    ((kind, fields),) = record.items()
    if kind == "TensorForm":
        lists = {"shape": tuple(fields["shape"]), "strides": tuple(fields["strides"])}
        return TensorForm(**{**fields, **lists})
    return AliasForm(**fields) if kind == "AliasForm" else ValueForm(**fields)


# Of the types that may stand beside tensors, exactly: a bool is an int, and an enum may be one too.
_WRITE: Mapping[type, Callable[[Any], str]] = {
    type(None): repr,
    bool: repr,
    int: repr,
    float: repr,
    complex: repr,
    str: str,
    torch.dtype: str,
    torch.device: str,
}
_READ: Mapping[str, Callable[[str], Any]] = {
    "NoneType": lambda text: None,  # noqa: ARG005
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "dtype": lambda text: getattr(torch, text.removeprefix("torch.")),
    "device": torch.device,
}


def is_plain(value: Any) -> bool:
    """Whether a value that is no tensor can be sent."""
    return type(value) in _WRITE


def pack(
    leaves: Sequence[Any], needs_gradient: Sequence[bool], spec: str, fixed: Mapping[int, str] | None = None
) -> tuple[Form, list[Tensor]]:
    """The form of a message, and its tensors, laid out as they are sent. In a tree a tensor that stands twice is sent once.

    Raises:
        TypeError: a value that cannot be sent.
    """
    forms: list[_LeafForm] = []
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    for number, (leaf, needed) in enumerate(zip(leaves, needs_gradient)):
        if not isinstance(leaf, Tensor):
            forms.append(_value_form(leaf))
        elif spec and places.setdefault(id(leaf), number) != number:
            forms.append(AliasForm(places[id(leaf)]))
        else:
            tensors.append(compact(leaf))
            forms.append(_tensor_form(leaf, tensors[-1], needed, fixed[number] if fixed and number in fixed else ""))
    return Form(spec, tuple(forms)), tensors


def _tensor_form(leaf: Tensor, dense: Tensor, needs_gradient: bool, fixed: str) -> TensorForm:
    strides = tuple(
        0 if full != sent else stride for full, sent, stride in zip(leaf.shape, dense.shape, dense.stride())
    )
    return TensorForm(tuple(leaf.shape), strides, str(leaf.dtype).removeprefix("torch."), needs_gradient, fixed)


def _value_form(value: Any) -> ValueForm:
    if not is_plain(value):
        raise TypeError(f"a {type(value).__name__} cannot be sent: only tensors, numbers, strings and None can")
    return ValueForm(type(value).__name__, _WRITE[type(value)](value))


def compact(tensor: Tensor) -> Tensor:
    """`tensor` with one entry per expanded dimension and memory without gaps: itself where it is so, else a copy."""
    tensor = tensor.resolve_conj().resolve_neg()  # bytes alone are sent
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor if _is_dense(tensor) else tensor.clone()


def conform(tensors: Sequence[Tensor], form: Form, found: Form, device: torch.device, what: str) -> list[Tensor]:
    """`tensors`, of the form `found`, laid out as the other end expects: only strides and missing gradients may differ.

    Raises:
        PipelineError: anything else has changed, although the inputs of the step had the shapes of an earlier one.
    """
    if found.spec != form.spec or len(found.leaves) != len(form.leaves):
        raise PipelineError(
            f"{what}: the structure of what the stage sends changed: then {form}, now {found}. {_CHANGED}"
        )
    given = iter(tensors)
    laid_out = []
    for number, (expected, actual) in enumerate(zip(form.leaves, found.leaves)):
        if not _fits(expected, actual):
            raise PipelineError(f"{what}: {found.name_of(number)} changed: then {expected}, now {actual}. {_CHANGED}")
        if isinstance(expected, TensorForm):
            laid_out.append(_restride(next(given) if isinstance(actual, TensorForm) else None, expected, device))
    return laid_out


_CHANGED = (
    "On a GPU what stages exchange may change with the shapes of the step's inputs and with requires_grad of parameters only: "
    "freeze by requires_grad_(False), and not inside a forward"
)
_NO_GRADIENT = ValueForm("NoneType", "None")


def unpack(form: Form, buffers: Sequence[Tensor]) -> list[Any]:
    """The leaves of a received message."""
    tensors = iter(buffers)
    leaves: list[Any] = []
    for leaf in form.leaves:
        if isinstance(leaf, TensorForm):
            leaves.append(next(tensors).expand(leaf.shape))
        else:
            leaves.append(leaves[leaf.leaf] if isinstance(leaf, AliasForm) else leaf.value())
    return leaves


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor in one dimension: what a transport that wants contiguous tensors sends."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _fits(expected: _LeafForm, actual: _LeafForm) -> bool:
    if not isinstance(expected, TensorForm):
        return actual == expected
    if actual == _NO_GRADIENT:
        return not expected.needs_gradient
    if not isinstance(actual, TensorForm):
        return False
    if (actual.shape, actual.dtype, actual.needs_gradient) != (expected.shape, expected.dtype, expected.needs_gradient):
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
