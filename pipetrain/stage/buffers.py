"""Buffers that F changes (running statistics, power iterations): R must see the value that F saw, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Copies = dict[int, dict[str, Tensor]]  # layer of the stage -> buffer name -> the value before F


class ChangingBuffers:
    """Knows which buffers of a stage's layers F changes, once it has compared them around one F."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._names: dict[int, tuple[str, ...]] | None = None
        self._modes: list[bool] = []

    def unknown(self) -> bool:
        """Whether the next F has to be compared: the first one, and the first after a switch between train and eval."""
        modes = [module.training for layer in self._layers for module in layer.modules()]
        known = self._names is not None and modes == self._modes
        self._modes = modes
        return not known

    def save(self, *, everything: bool) -> Copies:
        """Copies of the buffers that F is known to change; of all, while it is not known which."""
        names = self._names or {}
        if everything:
            names = {n: tuple(name for name, _ in layer.named_buffers()) for n, layer in enumerate(self._layers)}
        return {
            number: {name: self._layers[number].get_buffer(name).detach().clone() for name in wanted}
            for number, wanted in names.items()
            if wanted
        }

    def learn(self, before: Copies) -> Copies:
        """Compare with the values before F; returns those that F changed."""
        # By value: batch_norm writes its running statistics without a new version.
        changed = {
            number: {
                name: copy for name, copy in copies.items() if not _same(self._layers[number].get_buffer(name), copy)
            }
            for number, copies in before.items()
        }
        self._names = {number: tuple(copies) for number, copies in changed.items() if copies}
        return {number: copies for number, copies in changed.items() if copies}

    def restore(self, saved: Copies) -> None:
        """Undo an F that has to run again."""
        with torch.no_grad():
            for number, copies in saved.items():
                for name, copy in copies.items():
                    self._layers[number].get_buffer(name).copy_(copy)


def with_buffers(layer: nn.Module, copies: Mapping[str, Tensor] | None) -> Callable[[Any], Any]:
    """The layer's forward on `copies` of its buffers, which it may change, in the place of its own."""
    if copies is None:
        return layer
    return lambda value: functional_call(layer, dict(copies), (value,))


def _same(now: Tensor, before: Tensor) -> bool:
    return now.shape == before.shape and torch.equal(now, before)
