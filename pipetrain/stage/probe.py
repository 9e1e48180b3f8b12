"""Finds memory that stays after F outside of saved tensors (`ctx.x = x`, `self.last = x`), which no slot can empty.

Looks at every tensor that Python knows, so it runs on one or two microbatches of a run and not on the others.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.stage.meter import ActivationMeter, storages_of

# Less than this per microbatch is not worth a word. A torch.utils.checkpoint inside a layer keeps 5 kB: generator states.
_SMALL_BYTES = 1 << 16


def storages_alive() -> dict[int, int]:
    """Bytes of each storage that a Python tensor looks into, by identity."""
    found: dict[int, int] = {}
    alive = gc.get_objects()
    # Some hundred thousand objects of some thousand types: only the types are asked one by one.
    kinds = {kind for kind in set(map(type, alive)) if issubclass(kind, Tensor)}
    # What a class of tensors makes of being asked (a lazy parameter raises) does not matter here.
    with torch._C.DisableTorchFunctionSubclass():
        for thing in [one for one in alive if type(one) in kinds]:
            if thing.layout is torch.strided:
                # An undefined gradient has no memory to look into, nor has a nested tensor of its own kind.
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    storage = thing.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return found


def storages_in(value: Any) -> set[int]:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {storage._cdata for leaf in leaves for storage in storages_of(leaf)}


class HeldOutsideProbe:
    """Watches the forwards of one stage until it knows that nothing is held, or has said what is.

    The first forward is looked at as a whole. Only if something stayed is the second looked at layer by layer: what a
    layer computes once and keeps (a table of positions) is then there already and is not taken for a leak.
    """

    def __init__(self, name_of: Callable[[int], str], meter: ActivationMeter) -> None:
        """`meter` knows the storages that other threads make meanwhile: messages that arrive."""
        self._name_of = name_of
        self._meter = meter
        self._forwards = 0
        self.done = False
        self._before: dict[int, int] = {}
        self._born: dict[int, tuple[int, int]] = {}  # storage -> layer that made it, bytes

    def start(self) -> None:
        self._before = storages_alive()
        self._born.clear()

    def after_layer(self, layer: int) -> None:
        if self._forwards == 0:
            return
        for key, size in storages_alive().items():
            if size and key not in self._before and key not in self._born:
                self._born[key] = (layer, size)

    def end(self, outputs: Any, wanted: Iterable[Any]) -> None:
        """F is done; `outputs` and `wanted` (the stash) may stay."""
        self._forwards += 1
        allowed = storages_in(outputs) | storages_in(list(wanted)) | set(self._before)
        left = self._left(allowed)
        if sum(left.values()) >= _SMALL_BYTES:
            gc.collect()  # cycles are garbage, not held
            left = self._left(allowed)
        if self._forwards == 1:
            self.done = sum(left.values()) < _SMALL_BYTES
            return
        self.done = True
        held: dict[int, int] = {}
        for key, (layer, size) in self._born.items():
            if key in left:
                held[layer] = held.get(layer, 0) + size
        for layer, size in held.items():
            if size < _SMALL_BYTES:
                continue
            warnings.warn(
                f"{self._name_of(layer)} holds {size} bytes per microbatch outside of its saved tensors (such as ctx.x = x "
                "or self.last = x): recompute cannot free them. In an autograd.Function use ctx.save_for_backward",
                stacklevel=2,
            )
        self._before.clear()
        self._born.clear()

    def _left(self, allowed: Set[int]) -> dict[int, int]:
        alive = storages_alive()
        time.sleep(0.005)  # a thread that has just made a message's buffer gets to say so
        messages = self._meter.message_storages
        return {key: size for key, size in alive.items() if size and key not in allowed and key not in messages}
