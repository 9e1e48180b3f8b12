"""The form of a message between stages: shapes, dtypes, strides, plain values, and which tensors need a gradient.

The form travels with the first message of its kind; afterwards both ends know it, so that a receive can be posted ahead
with the right size and nothing but the tensors' own bytes is sent.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from pipetrain.comm.failure import PipelineError


@dataclass(frozen=True)
class TensorForm:
    """One tensor. A stride of 0 is an expanded dimension, of which one entry is sent.

    `fixed` says why its receiver may not change it in place; empty: it may.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    fixed: str = ""

    @cached_property
    def num_bytes(self) -> int:
        """Of what is sent."""
        return self.dtype.itemsize * math.prod(self._sent_shape)

    @cached_property
    def _sent_shape(self) -> list[int]:
        return [1 if stride == 0 else size for size, stride in zip(self.shape, self.strides)]

    def empty(self, device: torch.device) -> Tensor:
        """A buffer for what is sent: as `compact` lays it out."""
        return torch.empty_strided(self._sent_shape, self.strides, dtype=self.dtype, device=device)

    def within(self, memory: UntypedStorage) -> Tensor:
        """The same, at the start of `memory`."""
        buffer = torch.empty(0, dtype=self.dtype, device=memory.device)
        return buffer.set_(memory, 0, self._sent_shape, self.strides)

    def record(self) -> list[Any]:
        return ["tensor", self.shape, self.strides, str(self.dtype), self.needs_gradient, self.fixed]


@dataclass(frozen=True)
class AliasForm:
    """The very tensor that stands in an earlier leaf of the message; it is sent once."""

    leaf: int

    def record(self) -> list[Any]:
        return ["alias", self.leaf]


@dataclass(frozen=True)
class ValueForm:
    """A plain value as text: 1 and True and 1.0 are different, and NaN is equal to itself."""

    kind: str
    text: str

    @staticmethod
    def of(value: Any) -> ValueForm:
        return ValueForm(type(value).__name__, str(value))

    @property
    def value(self) -> Any:
        return _READ[self.kind](self.text)

    def record(self) -> list[Any]:
        return [self.kind, self.text]


_LeafForm = TensorForm | AliasForm | ValueForm


@dataclass(frozen=True)
class Form:
    """A tree of tensors and plain values: `spec` is its structure (None: a mere list), `leaves` what stands in it."""

    spec: pytree.TreeSpec | None
    leaves: tuple[_LeafForm, ...]

    @cached_property
    def tensors(self) -> list[TensorForm]:
        """What is sent, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    @cached_property
    def wanted(self) -> frozenset[int]:
        """The leaves that need a gradient; of a tensor that occurs twice, the first leaf."""
        return frozenset(
            n for n, leaf in enumerate(self.leaves) if isinstance(leaf, TensorForm) and leaf.needs_gradient
        )

    @cached_property
    def fixed(self) -> dict[int, str]:
        """The leaves that their receiver may not change in place, and why."""
        return {n: leaf.fixed for n, leaf in enumerate(self.leaves) if isinstance(leaf, TensorForm) and leaf.fixed}

    def name_of(self, index: int) -> str:
        """What a leaf is called in an error."""
        return f"the gradient of leaf {index}" if self.spec is None else leaf_names(self.spec, "output")[index]

    def to_json(self) -> bytes:
        leaves = [leaf.record() for leaf in self.leaves]
        return json.dumps([None if self.spec is None else spec_text(self.spec), leaves]).encode()

    @staticmethod
    def from_json(text: bytes) -> Form:
        spec, leaves = json.loads(text)
        return Form(None if spec is None else structure(spec), tuple(_leaf_form(*leaf) for leaf in leaves))


def _leaf_form(kind: str, *fields: Any) -> _LeafForm:
    if kind == "tensor":
        shape, strides, dtype, needs_gradient, fixed = fields
        return TensorForm(tuple(shape), tuple(strides), _dtype_of(dtype), needs_gradient, fixed)
    return AliasForm(*fields) if kind == "alias" else ValueForm(kind, *fields)


def _dtype_of(text: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype


# The types that a message may have beside tensors, and how `str` of a value is read. No subclasses: a bool is an int, an enum may be one.
_PLAIN: Mapping[type, Callable[[str], Any]] = {
    type(None): lambda _: None,
    bool: lambda text: text == "True",
    int: int,
    float: float,
    complex: complex,
    str: str,
    torch.dtype: _dtype_of,
    torch.device: torch.device,
}
_READ = {kind.__name__: read for kind, read in _PLAIN.items()}


def is_plain(value: Any) -> bool:
    """Whether a message may have this value beside its tensors."""
    return type(value) in _PLAIN


def pack(
    leaves: Sequence[Any],
    needs_gradient: Sequence[bool],
    spec: pytree.TreeSpec | None,
    fixed: Mapping[int, str] | None = None,
) -> tuple[Form, list[Tensor]]:
    """The form of a message, and its tensors, laid out as they are sent. A tensor that occurs twice in a tree is sent once.

    Raises TypeError: a value that cannot be sent.
    """
    forms: list[_LeafForm] = []
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    for index, (leaf, needed) in enumerate(zip(leaves, needs_gradient)):
        if not isinstance(leaf, Tensor):
            if not is_plain(leaf):
                kind = type(leaf).__name__
                raise TypeError(f"a {kind} cannot be sent: only tensors, numbers, strings and None can")
            forms.append(ValueForm.of(leaf))
        elif spec is not None and places.setdefault(id(leaf), index) != index:
            forms.append(AliasForm(places[id(leaf)]))
        else:
            tensors.append(compact(leaf))
            forms.append(_tensor_form(leaf, tensors[-1], needed, fixed[index] if fixed and index in fixed else ""))
    return Form(spec, tuple(forms)), tensors


def _tensor_form(leaf: Tensor, dense: Tensor, needs_gradient: bool, fixed: str) -> TensorForm:
    strides = tuple(
        0 if full != sent else stride for full, sent, stride in zip(leaf.shape, dense.shape, dense.stride())
    )
    return TensorForm(tuple(leaf.shape), strides, leaf.dtype, needs_gradient, fixed)


def compact(tensor: Tensor) -> Tensor:
    """`tensor` with one entry per expanded dimension and memory without gaps: itself where it is so, else a copy."""
    tensor = tensor.resolve_conj().resolve_neg()  # bytes alone are sent
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor if _is_dense(tensor) else tensor.clone()


def conform(tensors: Sequence[Tensor], form: Form, found: Form, device: torch.device, what: str) -> list[Tensor]:
    """`tensors`, of the form `found`, laid out as the other end expects: only strides and missing gradients may differ.

    Raises PipelineError: anything else has changed, although the inputs of the step had the shapes of an earlier one.
    """
    if found.spec != form.spec or len(found.leaves) != len(form.leaves):
        raise PipelineError(
            f"{what}: the structure of what the stage sends changed: then {form}, now {found}. {_CHANGED}"
        )
    given, laid_out = iter(tensors), []
    for index, (expected, actual) in enumerate(zip(form.leaves, found.leaves)):
        tensor = next(given) if isinstance(actual, TensorForm) else None
        if not _fits(expected, actual):
            raise PipelineError(f"{what}: {found.name_of(index)} changed: then {expected}, now {actual}. {_CHANGED}")
        if isinstance(expected, TensorForm):
            laid_out.append(_restride(tensor, expected, device))
    return laid_out


_CHANGED = (
    "What stages exchange may change with the inputs' shapes and plain values and with requires_grad of parameters only: freeze by "
    "requires_grad_(False) and not inside a forward, and pass what a layer computes on as a tensor of one shape"
)
_NO_GRADIENT = ValueForm.of(None)


def unpack(form: Form, buffers: Sequence[Tensor]) -> list[Any]:
    """The leaves of a received message."""
    tensors = iter(buffers)
    leaves: list[Any] = []
    for leaf in form.leaves:
        if isinstance(leaf, TensorForm):
            leaves.append(next(tensors).expand(leaf.shape))
        else:
            leaves.append(leaves[leaf.leaf] if isinstance(leaf, AliasForm) else leaf.value)
    return leaves


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor in one dimension: what a transport that wants contiguous tensors sends."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _fits(expected: _LeafForm, actual: _LeafForm) -> bool:
    if not isinstance(expected, TensorForm):
        return actual == expected
    if actual == _NO_GRADIENT:
        return not expected.needs_gradient
    if (
        not isinstance(actual, TensorForm)
        or dataclasses.replace(actual, strides=expected.strides, fixed=expected.fixed) != expected
    ):
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


# The structure of a tree as text: how tuples, lists, dicts and named tuples lie in each other. Reading it runs nothing that the text
# chooses: of classes it takes named tuples alone, and those of `torch.return_types`. -----------------------------------------------

_KINDS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
_RETURNED = "torch.return_types"
_PLAIN_KEYS = (str, int, float, bool, type(None))


@lru_cache(maxsize=64)
def spec_text(spec: pytree.TreeSpec) -> str:
    """A tree's structure as text.

    Raises TypeError: a type or a key that another rank cannot read, with what to return instead.
    """
    try:
        return json.dumps(_written(spec))
    except NotImplementedError as error:
        try:  # a node that torch can write, or that the user has registered with a name for this
            return pytree.treespec_dumps(spec)
        except (NotImplementedError, TypeError, ValueError):
            raise TypeError(str(error)) from None


@lru_cache(maxsize=64)
def structure(text: str) -> pytree.TreeSpec:
    """The structure of a tree, from `spec_text`."""
    record = json.loads(text)
    return _read(record) if record is None or isinstance(record, dict) else pytree.treespec_loads(text)


def leaf_names(spec: pytree.TreeSpec, root: str) -> list[str]:
    """What each leaf of a tree is called where the tree is called `root`: `output[1]['mask']`."""
    indexed = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [root + pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(indexed)[0]]


def _written(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return None
    kind, context = spec.type, spec.context
    if kind is namedtuple:  # of pytree: any class that namedtuple made
        name = [context.__module__, context.__qualname__]
        if _imported(name) is not context:
            raise TypeError(
                f"a {'.'.join(name)}, which other ranks cannot import by its name: define it at the top level of a module, or "
                "return a tuple or dict"
            )
        context = name
    elif kind in (dict, OrderedDict):
        context = [_written_key(key) for key in context]
    elif kind not in (tuple, list) and kind.__module__ != _RETURNED:
        raise NotImplementedError(
            f"a {kind.__name__}, whose structure cannot be told to another rank: return a tuple, list or dict, or register it "
            "with a serialized_type_name in torch.utils._pytree"
        )
    children = [_written(child) for child in spec.children()]
    return {"kind": [kind.__module__, kind.__name__], "context": context, "children": children}


def _written_key(key: Any) -> Any:
    if type(key) is tuple:
        return [_written_key(part) for part in key]
    if type(key) not in _PLAIN_KEYS:
        raise TypeError(
            f"a dict with the key {key!r} of type {type(key).__qualname__}: take strings, numbers or tuples of them as keys"
        )
    return key


def _imported(name: list[str]) -> Any:
    """The class of named tuples of that name; None: there is none."""
    try:
        thing: Any = importlib.import_module(name[0])
        for part in name[1].split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return None
    return thing if isinstance(thing, type) and issubclass(thing, tuple) and hasattr(thing, "_fields") else None


def _read(record: Any) -> pytree.TreeSpec:
    if record is None:
        return pytree.tree_structure(0)
    (module, name), context, children = record["kind"], record["context"], list(map(_read, record["children"]))
    if module == _RETURNED:
        return pytree.TreeSpec(getattr(torch.return_types, name), None, children)
    if name == namedtuple.__name__:
        return pytree.TreeSpec(namedtuple, _imported(context), children)
    return pytree.TreeSpec(_KINDS[name], None if context is None else list(map(_read_key, context)), children)


def _read_key(key: Any) -> Any:
    return tuple(map(_read_key, key)) if isinstance(key, list) else key
