"""The activation meter: bytes of distinct storages that a rank holds for a later B.

A storage counts once, even if several tensors view it. Its key is its identity, not its address, because the allocator reuses addresses.
Parameters, buffers, and casts of parameters that all sets share do not count.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from pipetrain.stage.tensor_copies import parts_of, storage_key

_KEY = attrgetter("_cdata")  # of a storage


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages of a tensor: one, several for a sparse or nested tensor, none for a tensor without memory."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return [tensor.untyped_storage()]
    return [part.untyped_storage() for part in parts_of(tensor)]


class ActivationMeter:
    """Counts the holders of each storage. The holder of a tensor calls `hold`, and later `release` with the key that `hold` returned."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._weights: frozenset[int] = frozenset()
        self._left_out: dict[int, int] = {}  # storage of a weight's cast -> how many callers left it out
        self._on_their_way: dict[int, int] = {}  # storage -> how many messages hold it, not yet sent or not yet used
        self.current_bytes = 0
        self.own_bytes = 0  # `current_bytes` without what was added or released within `apart`
        self._is_apart = False
        self.peak_bytes = 0
        self.stage_bytes = 0  # `current_bytes` without storages that only messages hold
        self.peak_stage_bytes = 0
        # Re-entrant: garbage collection within `hold` may free a slot, which calls `release` on the same thread.
        self._lock = threading.RLock()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For threads that do not compute: what the block adds and releases does not change `own_bytes`."""
        with self._lock:
            self._is_apart = True
            try:
                yield
            finally:
                self._is_apart = False

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of `tensors`, the parameters and buffers of the rank."""
        self._weights = frozenset(map(_KEY, itertools.chain.from_iterable(map(storages_of, tensors))))

    def leave_out(self, storage: int) -> None:
        """Do not count this storage until `count_again`: a weight's cast stays allocated, whoever holds it."""
        with self._lock:
            self._left_out[storage] = self._left_out.get(storage, 0) + 1

    def count_again(self, storage: int) -> None:
        with self._lock:
            self._left_out[storage] -= 1
            if not self._left_out[storage]:
                del self._left_out[storage]

    def hold(self, tensor: Tensor, *, on_its_way: bool = False) -> int:
        """Count the storage of `tensor`. Returns the key for `release`; 0: the storage does not count. `on_its_way`: the holder is an
        outgoing message not yet sent, or an incoming one not yet used."""
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        first, *others = (tensor.untyped_storage(),) if is_dense else storages_of(tensor) or (None,)
        key: int = 0 if first is None else first._cdata
        if first is None or key in self._weights or key in self._left_out:
            return 0
        with self._lock:
            holders = self._holders.get(key, 0)
            self._holders[key] = holders + 1
            if not holders:
                size = first.nbytes()
                for other in others:
                    size += other.nbytes()
                self._sizes[key] = size
                self.current_bytes += size
                self.own_bytes += 0 if self._is_apart else size
                self.peak_bytes = max(self.peak_bytes, self.current_bytes)
            if on_its_way:
                self._on_their_way[key] = self._on_their_way.get(key, 0) + 1
            elif holders == self._on_their_way.get(key, 0):
                self.stage_bytes += self._sizes[key]
                self.peak_stage_bytes = max(self.peak_stage_bytes, self.stage_bytes)
        return key

    def release(self, key: int, *, on_its_way: bool = False) -> None:
        """End one `hold` of the storage. Call this while the holder still has the tensor; later the key may be that of another storage."""
        if not key:
            return
        with self._lock:
            holders = self._holders[key] - 1
            if on_its_way:
                self._on_their_way[key] -= 1
                if not self._on_their_way[key]:
                    del self._on_their_way[key]
            elif holders == self._on_their_way.get(key, 0):
                self.stage_bytes -= self._sizes[key]
            if holders:
                self._holders[key] = holders
            else:
                del self._holders[key]
                size = self._sizes.pop(key)
                self.current_bytes -= size
                self.own_bytes -= 0 if self._is_apart else size

    def uncounted_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those storages of `tensors` that no `hold` counts. Each counts once; weights and left-out storages do not."""
        found: dict[int, int] = {}
        for tensor in tensors:
            storages = storages_of(tensor)
            key = storages[0]._cdata if storages else 0
            if key and key not in found and key not in self._holders and not self.is_left_out(key):
                found[key] = sum(storage.nbytes() for storage in storages)
        return sum(found.values())

    def is_left_out(self, storage: int) -> bool:
        return storage in self._weights or storage in self._left_out

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more (fewer if negative), for storages that nothing else holds."""
        with self._lock:
            self.current_bytes += num_bytes
            self.own_bytes += 0 if self._is_apart else num_bytes
            self.stage_bytes += num_bytes
            if num_bytes > 0:
                self.peak_bytes = max(self.peak_bytes, self.current_bytes)
                self.peak_stage_bytes = max(self.peak_stage_bytes, self.stage_bytes)

    def start_step(self) -> None:
        self.peak_bytes, self.peak_stage_bytes = self.current_bytes, self.stage_bytes


class CountedBytes:
    """Counts bytes in the meter until this object is freed; each slot of a set refers to it. It counts `own_bytes`, and the storages of
    `shared` tensors, which other objects may hold as well."""

    __slots__ = ("_keys", "_meter", "_shared", "num_bytes")

    def __init__(self, meter: ActivationMeter, own_bytes: int, shared: Sequence[Tensor] = ()) -> None:
        self._meter = meter
        self.num_bytes = own_bytes
        self._shared = shared
        meter.add(own_bytes)
        self._keys = tuple(map(meter.hold, shared))

    def __del__(self) -> None:
        self._meter.add(-self.num_bytes)
        for key in self._keys:
            self._meter.release(key)


class SetSize:
    """The bytes of a set of one kind, found from the first two sets. A storage in both (such as a table) is shared by all sets; any other
    belongs to one set."""

    def __init__(self) -> None:
        self.is_known = False
        self._own_bytes = 0
        self._shared: tuple[Tensor, ...] = ()
        self._of_first: dict[int, StorageWeakRef] | None = None

    def counted(self, meter: ActivationMeter, tensors: Iterable[Tensor]) -> CountedBytes:
        """Count a set. Once the size is known, `tensors` are ignored."""
        if self.is_known:
            return CountedBytes(meter, self._own_bytes, self._shared)
        by_storage = {storage_key(tensor): tensor for tensor in tensors}
        by_storage.pop(0, None)
        if self._of_first is None:
            self._of_first = {key: StorageWeakRef(one.untyped_storage()) for key, one in by_storage.items()}  # type: ignore[no-untyped-call]
            return CountedBytes(meter, meter.uncounted_bytes(by_storage.values()))
        both = by_storage.keys() & self._of_first.keys()
        shared = {key for key in both if not self._of_first[key].expired()}  # type: ignore[no-untyped-call]
        self._shared = tuple(by_storage[key] for key in shared if not meter.is_left_out(key))
        self._own_bytes = meter.uncounted_bytes(tensor for key, tensor in by_storage.items() if key not in shared)
        self.is_known = True
        return CountedBytes(meter, self._own_bytes, self._shared)
