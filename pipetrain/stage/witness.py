"""The witness: in each step one microbatch of each stage, in turn, of whose saved tensors F and R take checksums.

So a layer that begins to do something else in R than in F, after its first microbatch was proved, is an error within as many steps as there are
microbatches. F takes a checksum at the end of each layer, since an operation may fill a tensor that it has saved already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipetrain.stage.tensor_copies import as_integers

if TYPE_CHECKING:
    from pipetrain.stage.slots import Slot

_FACTOR, _MASK = 2654435761, 0x7FFFFFFF


class Witness:
    """The checksums of one set."""

    def __init__(self) -> None:
        self._of_layer: list[tuple[int, Tensor]] = []
        self._sums: dict[int, Tensor] = {}  # by slot

    def see(self, number: int, tensor: Tensor) -> None:
        """F saves this in the slot of this number."""
        self._of_layer.append((number, tensor.detach()))

    def end_layer(self) -> None:
        """A layer of F has ended: nothing is held of it any more."""
        for number, tensor in self._of_layer:
            found = checksum(tensor)
            if found is not None:
                self._sums[number] = found
        self._of_layer.clear()

    def first_difference(self, slots: Sequence[Slot]) -> Slot | None:
        """The first slot that R has filled with other values than F saved; None: they are the same. Waits for the device."""
        for slot in slots:
            expected = self._sums.get(slot.number)
            found = None if slot.tensor is None or expected is None else checksum(slot.tensor)
            if found is not None and expected is not None and not torch.equal(found, expected):
                return slot
        return None


def checksum(tensor: Tensor) -> Tensor | None:
    """Of the bits of a tensor their sum and their sum weighted by position, int64 [2]; None where it has no plain bits."""
    bits = as_integers(tensor)
    if bits is None or (
        bits.dtype is torch.uint8 and bits.dim() == 1
    ):  # what a library keeps for itself has gaps that nobody writes
        return None
    flat = bits.reshape(-1).to(torch.int64)
    # Weights that grow in no regular way, not even modulo a power of two: regular ones miss some permutations.
    weights = torch.arange(flat.numel(), device=flat.device).add_(1).mul_(_FACTOR).bitwise_and_(_MASK)
    weights.bitwise_xor_(weights >> 13).mul_(_FACTOR).bitwise_and_(_MASK)
    return torch.stack([flat.sum(), (flat * weights).sum()])
