"""The proof of a stage's R: F of one microbatch keeps its set, and the tensors that R saves are compared with it, layer by layer.

    F   keeps its set, although the schedule has an R for it
    R   runs to the end of the stage; at the end of each layer  [1] its saved tensors are compared with those of F, and dropped
                                                                [2] those that differ are held, and compared again at the end of R
    B   reads the tensors that F saved

So memory holds one set, R's tensors of one layer, and those that differ. A check at the time of saving would be too early: an
operation may still fill a tensor that it has saved, and a later layer may change one through `.data`. B reads a tensor as it is at
the end of F (if F filled the slots) or of R. The proof also finds where later Rs may end (`Stop`).

The witness compares F and R of one microbatch per stage in each later step, by a checksum of the saved tensors of each layer. The
next step takes the next microbatch. F of this microbatch also checks that no layer changes its attributes. So if R of a layer starts
to differ from F, an error says so after at most as many steps as there are microbatches. The witness runs only on a CPU (on a GPU
the bits of a kernel may differ from run to run), and not on a stage whose R must run to `Stop.AT_END`.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.testing._comparison import default_tolerances

from pipetrain.stage.tensor_copies import parts_of
from pipetrain.stage.traces import Look, attributes_of, first_change

if TYPE_CHECKING:
    from pipetrain.stage.meter import ActivationMeter
    from pipetrain.stage.slots import Slot


class Stop(enum.IntEnum):
    """Where R may end."""

    AT_SLOT = 0  # when the last slot is filled
    AT_LAYER = 1  # at the end of the layer that fills the last slot
    AT_END = 2  # at the end of the stage


class Proof:
    """Compares the tensors that one R saves with those that F has kept; `stop` says where later Rs may end."""

    def __init__(self) -> None:
        self.stop = Stop.AT_SLOT
        self._brought: list[tuple[Slot, Tensor]] = []  # of the layer that R is in: F's slot, R's tensor
        self._deferred: list[tuple[Slot, Tensor]] = []

    def bring(self, slot: Slot, tensor: Tensor) -> None:
        """Note that R has saved `tensor` where F filled `slot`."""
        self._brought.append((slot, tensor.detach()))

    def at_last_slot(self) -> None:
        """Called when R has saved the tensor for the last slot. If any tensor differs from F's by now, later Rs may not end here."""
        if self._deferred or any(_differ(*pair) for pair in self._brought):
            self.stop = max(self.stop, Stop.AT_LAYER)

    def at_layer_end(self, meter: ActivationMeter, *, last: bool) -> None:
        """Compare R's tensors of a layer with F's; hold those that differ. `last`: this layer has the last slot. `meter` notes the peak."""
        num_bytes = meter.uncounted_bytes(found for _, found in self._brought)
        meter.add(num_bytes)
        meter.add(-num_bytes)
        while self._brought:
            pair = self._brought.pop()
            if _differ(*pair):
                self._deferred.append(pair)
        if last and self._deferred:
            self.stop = Stop.AT_END

    def first_difference(self) -> tuple[Slot, str] | None:
        """The first slot whose tensor still differs from R's, and a text that says by how much. None: R has saved what F saved."""
        differing = [pair for pair in self._deferred if _differ(*pair)]
        if not differing:
            return None
        slot, found = min(differing, key=lambda pair: pair[0].number)
        assert slot.tensor is not None
        return slot, describe_difference(found, slot.tensor)

    def clear(self) -> None:
        self._brought.clear()
        self._deferred.clear()


def _differ(slot: Slot, found: Tensor) -> bool:
    assert slot.tensor is not None
    return differ(found, slot.tensor)


def differ(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one shape and dtype differ: on a CPU in a value (NaN = NaN, -0.0 = 0.0), on a GPU by more than rounding."""
    return any(_mask(a, b) is not None for a, b in _parts(found, expected))


def describe_difference(found: Tensor, expected: Tensor) -> str:
    """Say how many entries differ, and by how much at most."""
    count, total, largest = 0, 0, 0.0
    for ours, theirs in _parts(found, expected):
        total += theirs.numel()
        mask = _mask(ours, theirs)
        if mask is not None:
            count += int(mask.sum())
            apart = (_wide(ours[mask]) - _wide(theirs[mask])).abs()
            largest = max(largest, float(torch.nan_to_num(apart, nan=float("inf")).max()))
    return f"{count} of {total} entries differ, by up to {largest:.3g}"


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _parts(found: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of strided tensors to compare; none if the two share memory, may be workspaces, or cannot be compared."""
    may_be_passed_over = found.layout is torch.strided  # no part of a sparse tensor
    for one, other in () if found.is_nested else zip(parts_of(found), parts_of(expected)):
        is_passed_over = may_be_passed_over and (_is_workspace(one) or _share_memory(one, other))
        if one.layout is torch.strided and not is_passed_over:  # opaque layouts (mkldnn) have no comparison
            yield one, other


def _is_workspace(tensor: Tensor) -> bool:
    """Whether a tensor may be a library's workspace (oneDNN, cuDNN), which is not compared: gaps between its values stay unwritten."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _share_memory(found: Tensor, expected: Tensor) -> bool:
    return (
        found.untyped_storage()._cdata == expected.untyped_storage()._cdata
        and found.storage_offset() == expected.storage_offset()
        and found.stride() == expected.stride()
    )


def _mask(found: Tensor, expected: Tensor) -> Tensor | None:
    """A mask of the values in which two strided tensors differ; None: they do not differ."""
    if found.shape != expected.shape:  # of sparse tensors
        return torch.ones_like(expected, dtype=torch.bool)
    if torch.equal(found, expected):
        return None
    # On a GPU, where a library may choose another kernel for R, values may differ by as much as torch.testing allows.
    tolerances = (0.0, 0.0) if found.device.type == "cpu" else default_tolerances(found)
    are_close = found == expected if found.is_quantized else torch.isclose(found, expected, *tolerances, equal_nan=True)
    mask = ~are_close
    return mask if bool(mask.any()) else None


# Later steps ----------------------------------------------------------------------------------------------------------


class Witness:
    """The checksums of one set, by layer. `watched` has, per layer, the modules that may have state in attributes, with their names.

    F takes a checksum at the end of each layer, because an operation may fill a tensor that it has saved already. Parameters are skipped:
    R compares their versions.
    """

    def __init__(self, watched: Sequence[Sequence[tuple[str, nn.Module]]] = ()) -> None:
        self._watched = watched
        self._look: Look | None = None  # attributes of the layer that F is in, from before it ran
        self._slots: list[int] | None = None  # of that layer; None: F has not begun
        self._tensors: list[Tensor] = []  # that F has saved for these slots
        self._layers: list[tuple[list[int], int]] = []  # slots and checksum of each earlier layer

    def see(self, slot: int, tensor: Tensor) -> None:
        """Note a tensor that F saves in the layer that it is in."""
        assert self._slots is not None
        if type(tensor) is not nn.Parameter and type(tensor._base) is not nn.Parameter:
            self._slots.append(slot)
            self._tensors.append(tensor)

    def turn(self, layer: int | None) -> str | None:
        """End the layer that F was in: take its checksum and drop its tensors. Then begin `layer` (None: F ends, or R does not run this
        layer). Returns the first attribute that the ended layer changed, if any. (Not the glossary's *turn*, an op.)"""
        look, self._look, name = self._look, None, None
        if self._slots is not None:
            self._layers.append((self._slots, checksum(self._tensors)))
            if look is not None:
                name = first_change(look, attributes_of(self._watched[len(self._layers) - 1]))
        self._slots = []
        self._tensors.clear()
        if layer is not None and layer < len(self._watched) and self._watched[layer]:
            self._look = attributes_of(self._watched[layer])
        return name

    def first_difference(self, slots: Sequence[Slot]) -> int | None:
        """The first layer for which R has filled the slots with other values than F saved; None: all values are the same."""
        for layer, (numbers, expected) in enumerate(self._layers):
            tensors = [tensor for number in numbers if (tensor := slots[number].tensor) is not None]
            if checksum(tensors) != expected:
                return layer
        return None


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of the bits of some tensors, one after the other. Workspaces and sparse, nested or quantized tensors are skipped."""
    found = 0
    for tensor in tensors:
        is_workspace = tensor.dtype is torch.uint8 and _is_workspace(tensor)
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or is_workspace):
            plain = tensor.detach().contiguous()
            if plain.dtype is torch.bfloat16:  # which numpy does not know
                plain = plain.view(torch.int16)
            found = zlib.crc32(plain.numpy(force=True).data, found)
    return found
