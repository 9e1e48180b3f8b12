"""The proof of a stage's R: F of one microbatch keeps its set, and the tensors that R saves are compared with it, layer by layer.

    F   keeps its set, although the schedule has an R for it
    R   runs to the end of the stage; at the end of each layer  [1] its saved tensors are compared with those of F, and dropped
                                                                [2] those that differ are held, and compared again at the end of R
    B   reads the tensors that F saved

So memory holds one set, R's tensors of one layer, and those that differ. A check at the time of saving would be too early: an
operation may still fill a tensor that it has saved, and a later layer may change one through `.data`. B reads a tensor as it is at
the end of F (if F filled the slots) or of R. The proof also finds where later Rs may end (`Stop`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances

from pipetrain.stage.tensor_copies import parts_of

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
        is_passed_over = may_be_passed_over and (is_workspace(one) or _share_memory(one, other))
        if one.layout is torch.strided and not is_passed_over:  # opaque layouts (mkldnn) have no comparison
            yield one, other


def is_workspace(tensor: Tensor) -> bool:
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
