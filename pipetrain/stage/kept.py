"""The layers of a stage that no R runs. Their saved tensors stay from F to B. In R the next layer gets the output that they had in F."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.stage.entry import through_gate
from pipetrain.stage.errors import input_changed
from pipetrain.stage.slots import LateBoundSet


@dataclass
class Passed:
    """The output of a kept layer: the leaves of its tree, and which of them need a gradient. Until F has ended, `entered` holds the
    tensors that the next layer got, with their versions."""

    leaves: list[Any]
    requires_grad: list[bool]
    spec: pytree.TreeSpec
    entered: list[tuple[Tensor, int]]


class KeptLayers:
    """Their indices within the stage; `name_of` names one. `free`: those that run without hooks, since they take gradients inside."""

    def __init__(self, layers: set[int], name_of: Callable[[int], str]) -> None:
        self.layers = layers
        self.free: set[int] = set()
        self._name_of = name_of
        self._reported: set[int] = set()
        self._changed_in_place: set[int] = set()  # those whose output the next layer changes

    def add(
        self, late: LateBoundSet, layers: Sequence[int], why: str, *, free: bool = False, num_bytes: int = 0
    ) -> None:
        """From now on these layers are not recomputed; `free`: they run without hooks."""
        last = max(layers)
        self.layers.update(layers)
        if free:
            self.free.update(layers)
        late.keep_whole(set(layers), set(layers) if free else set())
        if late.keep or last in self._reported:
            return
        self._reported.add(last)
        size = f" ({num_bytes} bytes per microbatch)" if num_bytes else ""
        whose = f"its saved tensors{size}" if min(layers) == last else "the saved tensors of both, and between them,"
        warnings.warn(f"{why}: {whose} are kept from F to B and not recomputed", stacklevel=3)

    def pass_on(self, passed: dict[int, Passed], layer: int, output: Any, *, look: bool) -> Any:
        """Hold on to what a kept layer gives the next one, which gets a copy where it may change that in place."""
        leaves, spec = pytree.tree_flatten(output)
        own = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        if look or layer in self._changed_in_place:
            copies = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)}
            leaves = [copies.get(id(leaf), leaf) for leaf in leaves]
        entered = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        passed[layer] = Passed(own, requires_grad, spec, entered)
        return pytree.tree_unflatten(leaves, spec)

    def check(self, passed: dict[int, Passed], *, look: bool) -> None:
        """F has ended: which layers have changed in place what a kept layer gave them?

        Raises SavedTensorChanged: one that did not on its first microbatch.
        """
        for layer, one in passed.items():
            changed = any(tensor._version != version for tensor, version in one.entered)
            one.entered.clear()
            if changed and not look and layer not in self._changed_in_place:
                raise input_changed(
                    f"{self._name_of(layer + 1)} changes in place what {self._name_of(layer)} gave it, which it did not on its first "
                    "microbatch, so that R would see another input"
                )
            if changed:
                self._changed_in_place.add(layer)

    def pass_again(self, passed: Passed, layer: int, anchor: Tensor) -> Any:
        """What a kept layer gave in F, as its next layer gets it in R."""
        again = list[Any]()
        for leaf, requires_grad in zip(passed.leaves, passed.requires_grad):
            value = leaf
            if isinstance(leaf, Tensor):
                value = leaf.clone() if layer in self._changed_in_place else leaf.data
            # Whether it needs a gradient decides what is saved.
            again.append(through_gate(anchor, value) if requires_grad else value)
        return pytree.tree_unflatten(again, passed.spec)
