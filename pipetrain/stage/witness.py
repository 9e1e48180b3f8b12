"""The witness: in each step one microbatch of each stage, in turn, of whose saved tensors F and R take checksums.

So a layer that begins to do something else in R than in F, after its first microbatch was proved, is an error within as many steps as there are
microbatches. F takes a checksum at the end of each layer, since an operation may fill a tensor that it has saved already.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipetrain.stage.tensor_copies import as_integers

if TYPE_CHECKING:
    from pipetrain.stage.slots import Slot

_FACTOR, _MASK = 2654435761, 0x7FFFFFFF
_LENGTH = 1 << 16  # of the weights; what is longer is summed in rows, and so are these


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
    """The sum of the bits of a tensor, weighted by position, 0-dim int64; None where it has no plain bits."""
    bits = as_integers(tensor)
    if bits is None or (
        bits.dtype is torch.uint8 and bits.dim() == 1
    ):  # what a library keeps for itself has gaps that nobody writes
        return None
    return _weighted_sum(bits.reshape(-1).to(torch.int64))


def _weighted_sum(flat: Tensor) -> Tensor:
    weights, count = _weights(flat.device), flat.numel()
    if count <= _LENGTH:
        return torch.dot(flat, weights[:count])
    whole = count - count % _LENGTH
    rows = (flat[:whole].view(-1, _LENGTH) * weights).sum(1)
    return _weighted_sum(torch.cat([rows, flat[whole:]]))


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Numbers that grow in no regular way, not even modulo a power of two: regular ones miss some permutations."""
    weights = torch.arange(1, _LENGTH + 1, device=device).mul_(_FACTOR).bitwise_and_(_MASK)
    return weights.bitwise_xor_(weights >> 13).mul_(_FACTOR).bitwise_and_(_MASK)
