"""The proof of a stage's R: on one microbatch F keeps its set, and what R brings is compared with it, layer by layer.

    F   a set that is kept, although the schedule has an R for it
    R   runs to its end; at the end of each layer  [1] what it brought is compared with what F saved, and let go of
                                                   [2] what differs is looked at again at the end of R
    B   reads what F saved

So no more is held than one set and what R brings in one layer. A check when a tensor is saved would be too early: an operation may
fill a tensor that it has saved already, and a later layer may change one through `.data`. B reads the values that a tensor has at the
end of F, or at the end of R.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipetrain.stage.meter import ActivationMeter
    from pipetrain.stage.slots import Slot

# How far apart a value of F and one of R may be on a GPU, where a library may choose another kernel: relative, absolute.
# torch.testing's own, for each dtype.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


class Stop(enum.IntEnum):
    """Where R may end."""

    AT_SLOT = 0  # when the last slot is filled
    AT_LAYER = 1  # at the end of the layer that fills it
    AT_END = 2  # with the stage


class Proof:
    """Compares what one R brings with the slots of a set that F has kept; says where the next R may end."""

    def __init__(self) -> None:
        self.stop = Stop.AT_SLOT
        self._brought: list[tuple[Slot, Tensor]] = []  # of the layer that R is in: F's slot, R's tensor
        self._deferred: list[tuple[Slot, Tensor]] = []

    def bring(self, slot: Slot, tensor: Tensor) -> None:
        """R has saved `tensor` where F filled `slot`."""
        self._brought.append((slot, tensor.detach()))

    def at_last_slot(self) -> None:
        """R has brought the last tensor: it may end here if all are right by now."""
        if self._deferred or any(_differ(*pair) for pair in self._brought):
            self.stop = max(self.stop, Stop.AT_LAYER)

    def at_layer_end(self, meter: ActivationMeter, *, last: bool) -> None:
        """`last`: the layer that fills the last slot. `meter` is told of what R has brought."""
        meter.touch(meter.uncounted_bytes(found for _, found in self._brought))
        while self._brought:
            pair = self._brought.pop()
            if _differ(*pair):
                self._deferred.append(pair)
        if last and self._deferred:
            self.stop = Stop.AT_END

    def first_difference(self) -> tuple[Slot, str] | None:
        """The first slot that differs now, and by how much; None: R was right so far."""
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
    """Whether two tensors of one shape and dtype differ: in a bit on the CPU (NaN is NaN), by more than rounding on a GPU."""
    return any(_mask(a, b) is not None for a, b in _parts(found, expected))


def describe_difference(found: Tensor, expected: Tensor) -> str:
    """How many entries differ, and by how much."""
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
    """The strided tensors that two tensors consist of, where they do not share their memory."""
    if found.layout is torch.sparse_coo:
        yield from zip((found._indices(), found._values()), (expected._indices(), expected._values()))
    elif found.layout in {torch.sparse_csr, torch.sparse_bsr}:
        for part in (Tensor.crow_indices, Tensor.col_indices, Tensor.values):
            yield part(found), part(expected)
    elif found.layout in {torch.sparse_csc, torch.sparse_bsc}:
        for part in (Tensor.ccol_indices, Tensor.row_indices, Tensor.values):
            yield part(found), part(expected)
    elif found.layout is torch.strided and not (
        found.is_nested or _is_workspace(found) or _share_memory(found, expected)
    ):
        yield found, expected
    # Nested and opaque layouts (mkldnn) have no comparison.


def _is_workspace(tensor: Tensor) -> bool:
    """Plain bytes that a library (oneDNN, cuDNN) keeps for its backward: it never writes the gaps between its values."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _share_memory(found: Tensor, expected: Tensor) -> bool:
    return (
        found.untyped_storage()._cdata == expected.untyped_storage()._cdata
        and found.storage_offset() == expected.storage_offset()
        and found.stride() == expected.stride()
    )


def _mask(found: Tensor, expected: Tensor) -> Tensor | None:
    """Where two strided tensors differ; None: nowhere."""
    if found.shape != expected.shape:  # of sparse tensors
        return torch.ones_like(expected, dtype=torch.bool)
    tolerance = _TOLERANCES.get(found.dtype)
    if found.device.type != "cpu" and tolerance is not None:
        mask = ~torch.isclose(found, expected, *tolerance, equal_nan=True)
    elif torch.equal(found, expected):
        return None
    else:
        mask = ~((found == expected) | ((found != found) & (expected != expected)))
    return mask if bool(mask.any()) else None
