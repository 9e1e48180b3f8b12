"""Records every op of aten that its thread calls as a kernel on the current stream: which blocks it reads and writes.

An op that only makes another view of a storage launches nothing, nor does one that allocates without writing. A storage that is
seen for the first time is an allocation on the current stream; it is freed when its last owner lets go of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from virtual_gpu.recorded import Allocation, Free, HostWait, Kernel, RankRecording

# These allocate, or look at memory in another way, and launch nothing.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view", "lift_fresh"}
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
        self._count = 0
        self._unfilled: dict[int, list[Callable[[UntypedStorage], None]]] = {}  # block -> bring what messages have for it

    def of(self, tensor: Tensor, stream: int) -> int:
        """The block of a tensor, which is allocated on `stream` if it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key)
        if known is not None:
            return known[0]
        block = self._count
        self._count += 1
        self._alive[key] = block, weakref.ref(storage, functools.partial(self._free, key, block))
        self._recording.entries.append(Allocation(block, stream, storage.nbytes()))
        return block

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._alive

    def fill_later(self, tensor: Tensor, bring: Callable[[], Tensor]) -> None:
        """`bring()` gives the values of `tensor`, which is dense; it is called when somebody first reads the block."""
        place = tensor.dtype, tensor.storage_offset(), tensor.numel()

        def fill(storage: UntypedStorage) -> None:
            dtype, offset, size = place
            # A version counter of its own: on a GPU a transfer does not count as a change, either.
            torch.empty(0, dtype=dtype).set_(storage, offset, (size,), (1,)).copy_(bring())

        self._unfilled.setdefault(self._alive[tensor.untyped_storage()._cdata][0], []).append(fill)

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
        launches, written_places, host_waits = _facts(func)
        reads: list[int] = []
        writes: list[int] = []
        for place, argument in (*enumerate(args), *kwargs.items()):
            for tensor in _tensors(argument):
                block = self._blocks.of(tensor, stream)
                self._blocks.fill(block, tensor)
                (writes if place in written_places else reads).append(block)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if not self._blocks.knows(tensor):
                writes.append(self._blocks.of(tensor, stream))
        if launches:
            kernel = Kernel(stream, func._schema.name.partition("::")[2], tuple(reads), tuple(writes))
            self._recording.entries.append(kernel)
        if host_waits:
            self._recording.entries.append(HostWait(func._schema.name.partition("::")[2], stream=stream))
        return result


@functools.cache
def _facts(func: Any) -> tuple[bool, frozenset[int | str], bool]:
    """Of an op: whether it launches a kernel, which arguments it writes (by place and by name), whether the host waits."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in _WRITES_BESIDES.get(name, ()):
            written |= {place, argument.name}
    launches = not (func.is_view or name in _NO_KERNEL)
    return launches, frozenset(written), name in _HOST_WAITS


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors with memory in an argument or a result."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested and value.untyped_storage().nbytes():
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
