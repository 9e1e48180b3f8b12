"""The witness: in each step one microbatch of each stage, in turn, of whose saved tensors F and R take checksums, one per layer.

So a layer that begins to do something else in R than in F, after its first microbatch was proved, is an error within as many steps as there are
microbatches. F takes a checksum at the end of each layer, since an operation may fill a tensor that it has saved already. Parameters are
left out: their versions are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipetrain.stage.tensor_copies import as_integers

if TYPE_CHECKING:
    from pipetrain.stage.slots import Slot

_FACTOR, _MASK = 2654435761, 0x7FFFFFFF
_LENGTH = 1 << 16  # of the weights; what is longer is summed in pieces, and so are these
_MOST_JOINED = (
    1 << 20
)  # numbers of tensors that are put together first, which is quicker and takes their memory once more


class Witness:
    """The checksums of one set, by layer."""

    def __init__(self) -> None:
        self._slots: list[int] = []  # of the layer that F is in
        self._tensors: list[Tensor] = []  # that it has saved in them
        self._layers: list[tuple[list[int], Tensor | None]] = []  # of those before

    def see(self, slot: int, tensor: Tensor) -> None:
        """F saves this in the layer that it is in."""
        if type(tensor) is not nn.Parameter and type(tensor._base) is not nn.Parameter:
            self._slots.append(slot)
            self._tensors.append(tensor)

    def end_layer(self) -> None:
        """A layer of F has ended: nothing is held of it any more."""
        self._layers.append((self._slots, checksum(self._tensors)))
        self._slots = []
        self._tensors.clear()

    def first_difference(self, slots: Sequence[Slot]) -> int | None:
        """The first layer whose slots R has filled with other values than F saved; None: they are the same. Waits for the device."""
        for layer, (numbers, expected) in enumerate(self._layers):
            if expected is not None:
                found = checksum([tensor for n in numbers if (tensor := slots[n].tensor) is not None])
                if found is None or not torch.equal(found, expected):
                    return layer
        return None


def checksum(tensors: Iterable[Tensor]) -> Tensor | None:
    """The sum of the bits of some tensors, weighted by position, 0-dim int64; None where they have no plain bits."""
    with torch.no_grad():
        found = [bits.reshape(-1) for tensor in tensors if (bits := _bits(tensor)) is not None]
        if len(found) > 1:
            is_small = sum(one.numel() for one in found) <= _MOST_JOINED
            found = [torch.cat(found) if is_small else torch.stack([_weighted_sum(one) for one in found])]
        return _weighted_sum(found[0]) if found else None


def _bits(tensor: Tensor) -> Tensor | None:
    bits = as_integers(tensor)
    # What a library keeps for itself has gaps that nobody writes.
    return None if bits is None or (bits.dtype is torch.uint8 and bits.dim() == 1) else bits


def _weighted_sum(flat: Tensor) -> Tensor:
    weights = _weights(flat.device)
    if flat.numel() <= _LENGTH:
        return torch.dot(flat.to(torch.int64), weights[: flat.numel()])
    # Piece by piece: as 64-bit numbers, all of it would take more than the tensors do.
    return _weighted_sum(torch.stack([_weighted_sum(piece) for piece in torch.split(flat, _LENGTH)]))


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Numbers that grow in no regular way, not even modulo a power of two: regular ones miss some permutations."""
    weights = torch.arange(1, _LENGTH + 1, device=device).mul_(_FACTOR).bitwise_and_(_MASK)
    return weights.bitwise_xor_(weights >> 13).mul_(_FACTOR).bitwise_and_(_MASK)
