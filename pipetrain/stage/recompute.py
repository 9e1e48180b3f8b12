"""R of one set: the stage runs again under hooks that fill the slots of F, in the same order.

pack(t)   t fills the next slot, if F saved such a tensor there (by shape, dtype, and the operation that made it)
the end   at the last slot, at the end of its layer, or at the end of the stage (see `Stop`); no backward runs R's graph

The witness compares F and R of one microbatch per stage in each later step, by a checksum of the saved tensors of each layer. The
next step takes the next microbatch. F of this microbatch also checks that no layer changes its attributes. So if R of a layer starts
to differ from F, an error says so after at most as many steps as there are microbatches. The witness runs only on a CPU (on a GPU
the bits of a kernel may differ from run to run), and not on a stage whose R must run to `Stop.AT_END`.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from contextlib import AbstractContextManager
from operator import attrgetter
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipetrain.stage.errors import (
    RecomputeMismatch,
    SavedTensorChanged,
    Signature,
    as_text,
    mismatch,
    refuses_hooks,
    saved_changed,
)
from pipetrain.stage.meter import SetSize
from pipetrain.stage.microbatch import NODE_WITHOUT_BACKWARD
from pipetrain.stage.proof import Stop, is_workspace
from pipetrain.stage.selective import beside_mode
from pipetrain.stage.slots import LateBoundSet, Slot, both
from pipetrain.stage.traces import Look, attributes_of, first_change


class SetComplete(BaseException):
    """Raised to end R: all slots are full, and B needs nothing that the rest of R would compute."""


class Recompute:
    """One R of a set. It ends at `stop`; in a proof, at the end of the stage. With `detaches`, R detaches each tensor that fills a slot.
    Without it, the slots hold R's graph until B frees them. This saves host time, and is only for graphs that hold no other memory.

    An operation may save a tensor and then write to it. So R ends right at the last slot only if `last_signatures`, of the tensors saved by
    the last layer whose slots R fills, are those of a proof: `proved`; None: any.
    """

    _layer = -1  # the layer that R is in
    _filled = 0  # slots
    _is_complete = False
    _failure: RuntimeError | None = None

    def __init__(
        self,
        late: LateBoundSet,
        stop: Stop = Stop.AT_SLOT,
        proved: Sequence[Signature] | None = None,
        *,
        detaches: bool = True,
    ) -> None:
        self._late, self._proof, self._detaches = late, late.proof, detaches
        self._slots, self._signatures, self._end = late.slots, late.signatures, late.end
        start = late.starts[bisect_right(late.starts, late.end - 1) - 1] if late.end else 0
        self.last_signatures = late.signatures[start : late.end]
        is_proved = proved is None or stop is not Stop.AT_SLOT or self.last_signatures == proved
        self._stop = Stop.AT_END if late.proof else stop if is_proved else Stop.AT_LAYER
        self._most = len(late.slots)  # slots that may be filled; 0: R is complete

    def start_layer(self) -> AbstractContextManager[object] | None:
        """Begin R's next layer. Returns the context in which the layer runs; None: R does not run it, because F has kept its saved tensors.

        Raises SetComplete if R is complete, and as `fail` if the layer before did something else in R than in F.
        """
        late = self._late
        if self._layer >= 0:
            self._end_layer()
        if self._stop is Stop.AT_LAYER and self._filled >= self._end:
            raise SetComplete
        self._layer += 1
        if self._layer in late.whole:
            self._filled = late.starts[self._layer + 1]
            return None
        pack = self._fill if self._proof is None and late.casts is None else self._compare
        if late.outputs is None:
            return saved_tensors_hooks(pack, self._unpack)
        hooks = saved_tensors_hooks(beside_mode(pack), self._unpack)
        return both(hooks, late.outputs.in_recompute(self._layer, self.fail))

    def _fill(self, tensor: Tensor) -> None:
        number, node, is_as_in_f = self._filled, type(tensor.grad_fn), False
        if number < self._most:
            shape, dtype, made_by = self._signatures[number]
            is_made = node is made_by or node.__name__ == NODE_WITHOUT_BACKWARD
            is_as_in_f = is_made and tensor.shape == shape and tensor.dtype is dtype
        if not is_as_in_f:
            self._check_signature(tensor)
        slot = self._slots[number]
        # A leaf may be a buffer whose `.data` is a copy during R only. So the slot gets an alias, which stays in the copy's memory.
        slot.tensor = tensor.detach() if self._detaches or node is NoneType else tensor
        slot.version = tensor._version
        self._filled = number + 1
        if self._filled == self._end and self._stop is Stop.AT_SLOT:
            self._is_complete, self._most = True, 0
            raise SetComplete

    def _compare(self, tensor: Tensor) -> None:
        """Under autocast, report the tensor to the weight casts. In a proof, compare it; else do as `_fill`."""
        if self._late.casts is not None:
            self._late.casts.see_again(tensor)
        if self._proof is None:
            self._fill(tensor)
            return
        self._check_signature(tensor)
        self._proof.bring(self._slots[self._filled], tensor)
        self._filled += 1
        if self._filled == self._end:
            self._proof.at_last_slot()

    def _check_signature(self, tensor: Tensor) -> None:
        if self._is_complete:
            raise SetComplete
        signature = tensor.shape, tensor.dtype, type(tensor.grad_fn)
        if self._filled >= len(self._slots):
            self.fail(f"saves one tensor more than in F: {as_text(signature)}")
        expected = self._signatures[self._filled]
        if signature != expected and (signature[:2] != expected[:2] or signature[2].__name__ != NODE_WITHOUT_BACKWARD):
            self.fail(f"saves {as_text(signature)}, in F it was {as_text(expected)}")

    def _unpack(self, _: Any) -> NoReturn:
        if self._is_complete:
            raise SetComplete
        self.fail("takes a gradient inside the layer, which F did not")

    def is_what_was_meant(self, error: BaseException) -> bool:
        """Whether R was complete when a layer raised `error`. If R failed before, raises the error of that failure."""
        if not self._is_complete and self._failure is not None:
            raise self._failure
        if not self._is_complete and refuses_hooks(error):
            self.fail("takes a gradient inside the layer (torch.func), which F did not")
        return self._is_complete

    def _end_layer(self) -> None:
        # The layer may have caught an exception of the hooks, which is raised again here.
        if self._is_complete:
            raise SetComplete
        if self._failure is not None:
            raise self._failure
        late, expected = self._late, self._late.starts[self._layer + 1]
        if self._filled < expected:
            self._fail_because_it_ended()
        if self._filled > expected:
            self.fail(f"saves {self._filled - expected} tensors more than in F")
        if late.outputs is not None and self._layer not in late.whole and (left := late.outputs.left(self._layer)):
            self.fail(f"ended without {left} of the operations whose outputs F kept")
        if self._proof is not None:
            self._proof.at_layer_end(late.meter, last=late.starts[self._layer] < self._end <= expected)

    def end(self, own: Set[int] = frozenset(), size: SetSize | None = None) -> None:
        """End R: check that every slot is full. `own`: storages of the copies that R read in place of buffers. A saved view of such a copy
        has the buffer's version counter, which a later F may raise; so its slot gets a tensor with a new counter. `size`: of this kind's sets.

        Raises RecomputeMismatch: R saved fewer or more tensors, or other values; SavedTensorChanged: a saved tensor was changed in place.
        """
        if not self._is_complete and self._layer >= 0:
            self._end_layer()
        if self._filled < self._end:
            self._fail_because_it_ended()
        late = self._late
        if self._proof is not None:
            if (difference := self._difference()) is not None:
                raise difference
            self._proof.clear()
        else:
            if late.witness is not None and (layer := late.witness.first_difference(self._slots)) is not None:
                raise mismatch(late.name_of(layer), "saves other values than F, but saved equal ones in the first step")
            for slot in self._slots if own else ():
                if slot.tensor is not None and slot.storage() in own:
                    if slot.tensor._version != slot.version:
                        raise saved_changed(late.name_of_slot(slot), slot.tensor.shape, "later in the same recompute")
                    slot.fill(slot.tensor.data)
            late.count(size or SetSize())
        if late.outputs is not None:
            late.set_bytes_before = late.saved_outputs_bytes
        self._slots.clear()

    def fail(self, what: str, layer: int | None = None) -> NoReturn:
        """Raise RecomputeMismatch: R of `layer` (None: the layer that runs) did `what`. If the proof found an error, raise that instead."""
        if self._failure is None:
            self._failure = self._difference() or mismatch(
                self._late.name_of(self._layer if layer is None else layer), what
            )
        raise self._failure

    def _fail_because_it_ended(self) -> NoReturn:
        missing = as_text(self._signatures[self._filled])
        self.fail(f"ended without saving {missing}, which F saved", self._late.layer_of(self._filled))

    def _difference(self) -> RecomputeMismatch | SavedTensorChanged | None:
        """The error for the first tensor that differs in the proof: R had other values, or F's was changed in place. None: all agree."""
        found = None if self._proof is None else self._proof.first_difference()
        if found is None:
            return None
        slot, how = found
        if slot.tensor is not None and slot.tensor._version != slot.version:
            where, shape = self._late.name_of_slot(slot), slot.tensor.shape
            return saved_changed(where, shape, "after its forward, before it was recomputed")
        what = as_text(self._signatures[slot.number])
        return mismatch(self._late.name_of(self._late.layer_of(slot.number)), f"saves {what} with other values: {how}")


_TENSOR = attrgetter("tensor")


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
            if checksum(map(_TENSOR, map(slots.__getitem__, numbers))) != expected:
                return layer
        return None


def checksum(tensors: Iterable[Tensor | None]) -> int:
    """CRC-32 of the bits of some tensors, one after the other. Workspaces and sparse, nested or quantized tensors are skipped."""
    found = 0
    for tensor in tensors:
        if tensor is None or (tensor.dtype is torch.uint8 and is_workspace(tensor)):
            continue
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
            plain = tensor.detach().contiguous()
            if plain.dtype is torch.bfloat16:  # which numpy does not know
                plain = plain.view(torch.int16)
            found = zlib.crc32(plain.numpy(force=True).data, found)
    return found
