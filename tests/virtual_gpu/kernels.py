"""Records every op of aten that its thread calls as a kernel on the current stream: which blocks it reads and writes.

An op that only makes another view of a storage launches nothing, nor does one that allocates without writing. A storage that is
seen for the first time is an allocation on the current stream; it is freed when its last owner lets go of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from virtual_gpu.recorded import Allocation, Free, HostWait, Kernel, RankRecording

# These allocate, or look at memory in another way, and launch nothing.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view"}
)
# Written without a word in the schema: running mean and variance.
_WRITES_BESIDES = {"native_batch_norm": ("running_mean", "running_var")}
# On a GPU the host has to know a value, or how many there are: it waits for the stream.
_HOST_WAITS = frozenset(
    {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
)


class Blocks:
    """The blocks of one rank's device: numbered, by storage."""

    def __init__(self, recording: RankRecording) -> None:
        self._recording = recording
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # identity of a storage -> its block
        self._lent: dict[int, tuple[int, weakref.ref[Any]]] = {}  # second storages of the same memory
        self._count = 0
        self._of_host: dict[int, weakref.ref[Any]] = {}
        self._pinned: dict[int, tuple[int, weakref.ref[Any]]] = {}  # of the host, but copied by streams: numbered too
        self._unfilled: dict[
            int, list[Callable[[UntypedStorage], None]]
        ] = {}  # block -> bring what messages have for it

    def of(self, tensor: Tensor, stream: int) -> int:
        """The block of a tensor, which is allocated on `stream` if it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key) or self._lent.get(key)
        if known is not None:
            return known[0]
        block = self._count
        self._count += 1
        self._alive[key] = block, weakref.ref(storage, functools.partial(self._free, key, block))
        self._recording.entries.append(Allocation(block, stream, storage.nbytes()))
        return block

    def lend(self, alias: Tensor, block: int) -> None:
        """`alias` is a second storage with the memory of `block`, and keeps that alive."""
        storage = alias.untyped_storage()
        key = storage._cdata
        self._lent[key] = block, weakref.ref(storage, lambda _: self._lent.pop(key))

    def is_lent(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._lent

    def put_on_host(self, tensor: Tensor) -> None:
        """The memory of `tensor` is the host's: what reads and writes nothing else is no work of the device."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._of_host:
            self._of_host[key] = weakref.ref(storage, lambda _: self._of_host.pop(key, None))

    def pin(self, tensor: Tensor) -> None:
        """Streams copy to and from the memory of `tensor`, which is the host's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.put_on_host(tensor)
        self._pinned[key] = self._count, weakref.ref(storage, lambda _: self._pinned.pop(key))
        self._count += 1

    def of_pinned(self, tensor: Tensor) -> int | None:
        """The block of a tensor in memory that is pinned; no allocator gives that to others."""
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def put_on_device(self, tensor: Tensor) -> None:
        """It is on the device after all: `nn.Module.to`."""
        self._of_host.pop(tensor.untyped_storage()._cdata, None)

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._of_host

    def knows(self, tensor: Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key in self._alive or key in self._lent or key in self._of_host

    def fill_later(self, block: int, tensor: Tensor, bring: Callable[[], Tensor]) -> None:
        """`bring()` gives the values of `tensor`, which is dense and of `block`; it is called when somebody first reads that."""
        dtype, address, size = tensor.dtype, tensor.data_ptr(), tensor.numel()

        def fill(storage: UntypedStorage) -> None:
            offset = (address - storage.data_ptr()) // dtype.itemsize
            # A version counter of its own: on a GPU a transfer does not count as a change, either.
            torch.empty(0, dtype=dtype).set_(storage, offset, (size,), (1,)).copy_(bring())

        self._unfilled.setdefault(block, []).append(fill)

    def fill(self, block: int, tensor: Tensor) -> None:
        """Bring what messages have for the block of `tensor`, if nobody has read it so far."""
        if self._unfilled:
            for fill in self._unfilled.pop(block, ()):
                fill(tensor.untyped_storage())

    def _free(self, key: int, block: int, _: Any) -> None:
        del self._alive[key]
        self._unfilled.pop(block, None)
        self._recording.entries.append(Free(block))


class KernelMode(TorchDispatchMode):
    """While a thread is inside, what it computes is written down. `stream` says which stream is current; None: not now."""

    def __init__(self, recording: RankRecording, blocks: Blocks, stream: Callable[[], int | None]) -> None:
        super().__init__()
        self._recording = recording
        self._blocks = blocks
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stream = self._stream()
        if stream is None:
            return func(*args, **kwargs)
        arguments = [
            (place, tensor) for place, value in (*enumerate(args), *kwargs.items()) for tensor in _tensors(value)
        ]
        if _facts(func).name == "lift_fresh":  # what `torch.tensor` makes of numbers
            self._blocks.put_on_host(args[0])
        on_device = [(place, tensor) for place, tensor in arguments if not self._blocks.is_on_host(tensor)]
        if arguments and not on_device:
            result = func(*args, **kwargs)
            for tensor in _tensors(result):
                self._blocks.put_on_host(tensor)
            return result
        return self._on_device(func, args, kwargs, stream, on_device, arguments)

    def _on_device(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: int,
        tensors: Sequence[tuple[int | str, Tensor]],
        arguments: Sequence[tuple[int | str, Tensor]],
    ) -> Any:
        facts = _facts(func)
        reads: list[int] = []
        writes: list[int] = []
        for place, tensor in tensors:
            block = self._blocks.of(tensor, stream)
            self._blocks.fill(block, tensor)
            (writes if place in facts.written else reads).append(block)
        for place, tensor in arguments:
            if (pinned := self._blocks.of_pinned(tensor)) is not None:
                (writes if place in facts.written else reads).append(pinned)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if not self._blocks.knows(tensor):
                writes.append(self._blocks.of(tensor, stream))
        if facts.launches:
            self._recording.entries.append(Kernel(stream, facts.name, tuple(reads), tuple(writes)))
        if facts.host_waits:
            self._recording.entries.append(HostWait(facts.name, stream=stream))
        return result


class _Facts(NamedTuple):
    """Of an op of aten: `written` are the arguments that it writes, by place and by name."""

    name: str
    launches: bool
    written: frozenset[int | str]
    host_waits: bool


@functools.cache
def _facts(func: Any) -> _Facts:
    schema = func._schema
    name = schema.name.partition("::")[2]
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in _WRITES_BESIDES.get(name, ()):
            written |= {place, argument.name}
    launches = not (func.is_view or name in _NO_KERNEL)
    return _Facts(name, launches, frozenset(written), name in _HOST_WAITS)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors with memory in an argument or a result."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested and value.untyped_storage().nbytes():
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
