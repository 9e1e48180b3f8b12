"""Makes copies of tensors, compares them with the present values, and puts them in the tensors' place.

`tensor.data = copy` gives a tensor object the memory of the copy. So everything that refers to the object (a module that is used
twice, a layer that reads another's buffer) reads and writes the copy. Other tensors in the old memory (a saved tensor of another
microbatch, a view) keep their values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

# A buffer of at most this size is copied before every forward that is recomputed, whether or not it is known to change.
SMALL_BYTES = 1 << 16

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_small(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.nbytes <= SMALL_BYTES


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has one storage and strides: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place. It is 0 for an inference tensor, which does not count its changes."""
    return 0 if tensor.is_inference() else tensor._version


class TensorCopies:
    """Some tensors, each with a copy in separate memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.copies = list(map(copy_of, self.tensors))

    def changed(self) -> list[Tensor]:
        """The tensors whose values differ from those of their copies; waits for the device."""
        return [now for now, before in zip(self.tensors, self.copies) if not same_values(now, before)]

    def only(self, wanted: Iterable[Tensor]) -> TensorCopies:
        """A part of these copies: those of the tensors in `wanted`."""
        copies = {id(tensor): copy for tensor, copy in zip(self.tensors, self.copies)}
        some = TensorCopies(())
        some.tensors = [tensor for tensor in wanted if id(tensor) in copies]
        some.copies = [copies[id(tensor)] for tensor in some.tensors]
        return some

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """In the block, the copies are in the tensors' places."""
        live = [tensor.data for tensor in self.tensors]
        try:
            for tensor, copy in zip(self.tensors, self.copies):
                tensor.data = copy
            yield
        finally:
            for tensor, data in zip(self.tensors, live):
                tensor.data = data

    def storages(self, without: Container[int] = ()) -> set[int]:
        """The identities of the copies' storages, except for tensors whose ids are in `without`."""
        pairs = zip(self.tensors, self.copies)
        return {key for tensor, copy in pairs if id(tensor) not in without and (key := storage_key(copy))}


def storage_key(tensor: Tensor) -> int:
    """The identity of the tensor's storage; 0 for a sparse or nested tensor, which has no storage of its own."""
    if not is_dense(tensor):
        return 0
    key: int = tensor.untyped_storage()._cdata
    return key


def same_values(now: Tensor, before: Tensor) -> bool:
    """Whether shape, dtype and all values are equal; NaN equals NaN. Waits for the device."""
    if now.dtype != before.dtype or now.layout != before.layout or now.is_nested != before.is_nested:
        return False
    ours, theirs = parts_of(now), parts_of(before)
    return len(ours) == len(theirs) and all(
        one.shape == other.shape
        and (torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all()))
        for one, other in zip(ours, theirs)
    )


def fingerprint(tensor: Tensor) -> Tensor | None:
    """The wrapping sum of the elements, whose bits are read as integers: 0-dim, int64, on the device. None: not a plain dense tensor."""
    if not is_dense(tensor) or tensor.is_meta or tensor.is_quantized:
        return None
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    integers = _INTEGERS.get(plain.element_size())
    return None if integers is None else plain.view(integers).sum(dtype=torch.int64)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the strides of its tensor, without a graph."""
    copy = tensor.detach().clone()
    if is_dense(tensor) and copy.stride() != tensor.stride():
        # The order of a kernel's sums depends on strides, so a copy must have those of its tensor.
        return view_into(copy_of_storage(tensor), tensor)
    return copy


def copy_of_storage(tensor: Tensor) -> UntypedStorage:
    copy: UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return copy


def view_into(storage: UntypedStorage, tensor: Tensor) -> Tensor:
    """A tensor in `storage` with the offset, shape and strides of `tensor`."""
    alias = tensor.detach().new_empty(0)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Plain tensors that hold all values and indices of a sparse or nested tensor; else the tensor itself."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
