"""How many bytes of tensors are alive on a rank, seen from outside: one instrument for us and for every peer.

A dispatch mode sees each operation of the thread that computes; every storage that goes into or comes out of one is
followed by a weak reference until it is gone. Parameters, their gradients, buffers and the user's batch are left out.
What remains is what is held for a later backward, messages included, plus the temporaries of the operation at hand.
An emulated stage makes all it saves at one moment, so there the count is taken while it sleeps and nothing is temporary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """`current_bytes` and `peak_bytes` of distinct storages, while it is entered.

    The peak is taken after every operation, or only where `sample` is called.
    """

    def __init__(self, leave_out: Iterable[Tensor], *, every_operation: bool) -> None:
        super().__init__()
        self._every_operation = every_operation
        self.current_bytes = 0
        self.peak_bytes = 0
        self._left_out = [tensor.untyped_storage() for tensor in leave_out]  # held, so that no identity is used again
        self._known = {id(storage) for storage in self._left_out}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def restart(self, leave_out: Iterable[Tensor] = ()) -> None:
        """Begin a new peak; leave these out as well."""
        for tensor in leave_out:
            storage = tensor.untyped_storage()
            if id(storage) in self._watched:
                self._watched.pop(id(storage))
                self.current_bytes -= storage.nbytes()
            self._left_out.append(storage)
            self._known.add(id(storage))
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.arg_tree_leaves(*args, result, **(kwargs or {})):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf)
        if self._every_operation:
            self.sample()
        return result

    def sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _see(self, tensor: Tensor) -> None:
        storage: torch.UntypedStorage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in self._watched:
            return
        size = storage.nbytes()

        def gone(reference: weakref.ref[Any]) -> None:
            if self._watched.get(key) is reference:
                del self._watched[key]
                self.current_bytes -= size

        self._watched[key] = weakref.ref(storage, gone)
        self.current_bytes += size
