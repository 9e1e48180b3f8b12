"""The witness compares F and R of one microbatch per stage and step, by a checksum of the saved tensors of each layer. The
microbatches take turns. F also checks whether it changes attributes of a layer.

So if a layer begins to compute something else in R than in F, after its first microbatch was checked, an error says so within as many steps
as there are microbatches. F takes a checksum at the end of each layer, since an operation may fill a tensor that it has saved already.
Parameters are skipped: their versions are compared. On a CPU alone: on a GPU the bits of a kernel may differ from run to run.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipetrain.stage.traces import Look, attributes_of, first_change

if TYPE_CHECKING:
    from pipetrain.stage.slots import Slot


class Witness:
    """The checksums of one set, by layer. `watched` has, per layer, the modules that may have state in attributes, with their names."""

    def __init__(self, watched: Sequence[Sequence[tuple[str, nn.Module]]] = ()) -> None:
        self._watched = watched
        self._look: Look | None = None  # at the layer that F is in, as it was before
        self._slots: list[int] = []  # of that layer
        self._tensors: list[Tensor] = []  # that it has saved in them
        self._layers: list[tuple[list[int], int]] = []  # of those before

    def see(self, slot: int, tensor: Tensor) -> None:
        """F saves this in the layer that it is in."""
        if type(tensor) is not nn.Parameter and type(tensor._base) is not nn.Parameter:
            self._slots.append(slot)
            self._tensors.append(tensor)

    def start_layer(self, layer: int) -> None:
        """F comes to a layer that R will run."""
        if layer < len(self._watched) and self._watched[layer]:
            self._look = attributes_of(self._watched[layer])

    def end_layer(self) -> str | None:
        """A layer of F has ended: nothing is held of it any more. Returns the name of an attribute that it has changed."""
        layer, look, self._look = len(self._layers), self._look, None
        self._layers.append((self._slots, checksum(self._tensors)))
        self._slots = []
        self._tensors.clear()
        return None if look is None else first_change(look, attributes_of(self._watched[layer]))

    def first_difference(self, slots: Sequence[Slot]) -> int | None:
        """The first layer whose slots R has filled with other values than F saved; None: they are the same."""
        for layer, (numbers, expected) in enumerate(self._layers):
            if checksum(tensor for n in numbers if (tensor := slots[n].tensor) is not None) != expected:
                return layer
        return None


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of the bits of some tensors, one after the other; tensors without plain bits (sparse, nested, quantized) are skipped."""
    found = 0
    for tensor in tensors:
        # Plain bytes are what a library keeps for itself, which has gaps that nobody writes.
        is_workspace = tensor.dtype is torch.uint8 and tensor.dim() == 1
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or is_workspace):
            plain = tensor.detach().contiguous()
            if plain.dtype is torch.bfloat16:  # which numpy does not know
                plain = plain.view(torch.int16)
            found = zlib.crc32(plain.numpy(force=True).data, found)
    return found
