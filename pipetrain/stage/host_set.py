"""The storages of one microbatch's set that go to host memory after F and come back before B.

    F        fills the slots, as for a kept set
    OFFLOAD  asks for a copy of each of these storages into host memory, and empties their slots
    RELOAD   asks for the copies back into new device memory, and fills these slots with views of it
    B        reads the slots, as always

OFFLOAD and RELOAD may return before their copies end. Until they end, the caller holds the tensors that they read. The caller also
makes B wait for the copies of RELOAD.

Parameters, their casts, and tensors without plain bytes (sparse, nested, quantized, subclasses) stay on the device, in their slots.
So do storages below 64 KiB, which are not worth a copy, and storages that others hold too, such as the batch of which a microbatch
is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from pipetrain.stage.errors import saved_changed
from pipetrain.stage.meter import ActivationMeter, CountedBytes
from pipetrain.stage.slots import LateBoundSet, Slot
from pipetrain.stage.tensor_copies import SMALL_BYTES, is_dense

Copy = Callable[[Tensor, Tensor], None]  # (target, source), both bytes
Allocate = Callable[[int], UntypedStorage]

LEAST_BYTES = SMALL_BYTES  # of a storage that is copied
_ALIGNMENT = 64  # bytes: the alignment of each storage in host memory; enough for any dtype, and a cache line


class _View(NamedTuple):
    """Where the tensor of a slot lies in its storage, so that an equal view of a copy of the storage can be made."""

    slot: Slot
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        assert self.slot.tensor is not None
        return self.slot.tensor

    def of(self, memory: UntypedStorage, device: torch.device) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=device).set_(memory, self.offset, self.shape, self.stride)


class HostSet:
    """The storages of a set that are copied. They take `num_bytes` of host memory, in which they lie one after the other."""

    def __init__(
        self, late: LateBoundSet, meter: ActivationMeter, device: torch.device, staying: Set[int] = frozenset()
    ) -> None:
        """`late` has the filled slots; `staying` are storages that stay on the device."""
        self._late, self._meter, self._device = late, meter, device
        self._memory: Tensor | None = None  # on the host
        views: dict[int, list[_View]] = {}
        for slot in late.slots:
            tensor = slot.tensor
            if tensor is None:
                continue
            key = slot.storage()
            if not _has_plain_bytes(tensor) or meter.is_left_out(key):
                staying |= {key}
                continue
            view = _View(slot, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
            views.setdefault(key, []).append(view)
        self._views = [of_storage for key, of_storage in views.items() if key not in staying]
        self._sizes = [of_storage[0].tensor.untyped_storage().nbytes() for of_storage in self._views]
        self._starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes), initial=0))

    @property
    def num_bytes(self) -> int:
        return self._starts[-1]

    def leave(self, memory: Tensor, copy: Copy) -> list[Any]:
        """OFFLOAD: asks for the copies into `memory` (uint8, on the host), and empties the slots of the copied storages.

        Returns objects that the caller must hold until the copies have ended: they keep the memory allocated and counted.

        Raises:
            SavedTensorChanged: a tensor was changed in place since F saved it.
        """
        held: list[Any] = []
        self._memory = memory
        for of_storage, start, size in zip(self._views, self._starts, self._sizes):
            for view in of_storage:
                if view.tensor._version != view.slot.version:
                    where = self._late.name_of_slot(view.slot)
                    raise saved_changed(where, view.shape, "before it was copied to host memory")
            copy(memory[start : start + size], _bytes_of(of_storage[0].tensor.untyped_storage(), self._device))
            for view in of_storage:
                held += (view.tensor, view.slot.counted)
                view.slot.tensor = view.slot.counted = None
        return held

    def come_back(self, allocate: Allocate, copy: Copy) -> Tensor:
        """RELOAD: asks for the copies into memory that `allocate(num_bytes)` returns, and fills the slots of `leave` with views of it.

        Returns the `memory` on the host, which may be used again when the copies have ended.
        """
        assert self._memory is not None
        memory, self._memory = self._memory, None
        for of_storage, start, size in zip(self._views, self._starts, self._sizes):
            storage = allocate(size)
            copy(_bytes_of(storage, self._device)[:size], memory[start : start + size])
            for view in of_storage:
                tensor = view.of(storage, self._device)
                view.slot.fill(tensor)
                view.slot.counted = CountedBytes(self._meter, 0, (tensor,))
        self._views = []
        self._late.slots.clear()  # the graph owns them; each is freed with its node
        return memory


def _has_plain_bytes(tensor: Tensor) -> bool:
    """Whether the tensor can be made again from the bytes of its storage and a `_View`, and the storage has `LEAST_BYTES` or more."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and is_dense(tensor)
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= LEAST_BYTES
    )


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
