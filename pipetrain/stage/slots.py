"""Late-bound sets: F leaves an empty slot for each tensor that B will need, R fills the slots, B reads them.

Autograd runs a backward node on the stream on which its forward ran, so a graph that R built would take B to R's
stream. Here B runs on the graph of F; only the tensors come from R, whose own graph is thrown away.

    F   pack    -> Slot()            [1] an empty slot goes into the graph; the tensor is not held
    R   pack(t) -> slot.tensor = t   [2] the same layers save the same tensors in the same order
    B   unpack  -> slot.tensor       [3] read, not emptied: a node may read twice; the slot goes when its node goes

Saved-tensor hooks switch off autograd's own check that no saved tensor was changed in place, so it is made here: at the
end of F, at the end of R, and when B reads.

A layer may catch what is raised through it. So what the hooks raise to get out of a layer is no Exception, and what they want
is noted as well: whoever ran the layer asks for it when the layer has returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.errors import (
    RecomputeMismatch,
    SavedTensorChanged,
    Signature,
    as_text,
    refuses_hooks,
    saved_changed,
)
from pipetrain.stage.meter import ActivationMeter, CountedBytes, SetSize
from pipetrain.stage.proof import Proof, Stop
from pipetrain.stage.selective import KeptOutputs, Selection, beside_mode
from pipetrain.stage.tensor_copies import Storages, copy_of_storage, storage_key, view_into
from pipetrain.stage.witness import Witness


class NeedsGradientInside(BaseException):
    """A layer took a gradient inside its forward: saved tensors are wanted while F still runs, and their slots are empty."""


class SetComplete(BaseException):
    """The last slot is full: the rest of R would compute what nobody reads."""


# The node of what R begins with behind a layer that it passes over, which in F was that layer's.
_ENTERED = "GateBackward"


class Slot:
    """The place of one saved tensor in the graph of F; empty until it is filled by F (kept set) or by R."""

    tensor: Tensor | None = None
    version = 0
    number = 0  # in its set
    counted: CountedBytes | None = None

    def fill(self, tensor: Tensor) -> None:
        # Detached: the tensor may be an output of the node that will own this slot, and a cycle would keep both alive.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def storage(self) -> int:
        """The identity of the tensor's storage; 0 where it has none of its own."""
        return 0 if self.tensor is None else storage_key(self.tensor)


class LateBoundSet:
    """The slots of one (stage, microbatch), from F to B.

    `name_of(layer)` names a layer of the stage in an error; layers are numbered from 0 within the stage. Where there is a
    `proof`, F fills the slots, and R's tensors are compared with them. `casts` is told of what is saved, where autocast is on.
    `selection` says which outputs F keeps for R. `watches`: F looks whether what it saves is changed in place before it ends;
    where it does not, and the slots are empty, R does, which runs the same operations. `split`: some of what fills the slots waits for W
    longer than the rest.
    """

    def __init__(
        self,
        name_of: Callable[[int], str],
        meter: ActivationMeter,
        *,
        keep: bool,
        proof: Proof | None = None,
        casts: WeightCasts | None = None,
        selection: Selection | None = None,
        watches: bool = True,
        witness: Witness | None = None,
        split: bool = False,
    ) -> None:
        self.keep = keep
        self.proof = proof
        self.is_filled = keep or proof is not None  # by F
        self.wanted: int | None = None  # the layer whose empty slot another, or the same, has read in F
        self.hooks_refused = False  # the layer that F is in has asked for no hooks
        self.reads_from: dict[int, int] = {}  # a layer that read slots in F -> the first layer of which it read one
        self.whole: set[int] = set()  # layers whose saved tensors F keeps: R brings nothing of theirs
        self.free: set[int] = set()  # of these, those that run without hooks
        self.layer = -1  # that F or R is in
        self.num_bytes = 0  # of what fills the slots
        self.set_bytes_before = 0  # of the set that R brings, what was held already: kept outputs that it saved
        self._is_in_forward = True
        self._split = split
        self._casts = casts
        self._name_of = name_of
        self._meter = meter
        self._slots: list[Slot] = []
        self._signatures: list[Signature] = []
        self._witness = witness
        self._watches = watches or self.is_filled
        self._aliases: list[tuple[int, int, Tensor]] = []  # slot, version, what shares the version counter
        self._starts: list[int] = []  # the first slot of each layer, and when F has ended the number of slots
        self._filled = 0
        self._most = 0  # as many slots may be filled
        self._end = 0  # as many slots are filled when R is complete
        self._stop = Stop.AT_SLOT
        self._is_complete = False
        self._failure: RuntimeError | None = None
        # Outputs that R does not compute; None: it computes all, or there is no R.
        self._outputs = None if selection is None or keep else KeptOutputs(selection, meter)

    # F ----------------------------------------------------------------------------------------------------------

    def keep_whole(self, layers: Set[int], free: Set[int]) -> None:
        """The saved tensors of these layers stay in the graph of F, as they are; `free` are those that run without hooks."""
        self.whole |= layers
        self.free |= free

    def start_layer(self, value: Any = None) -> AbstractContextManager[object]:
        """F goes on to its next layer, which gets `value` and runs under what this returns."""
        self.layer += 1
        self._starts.append(len(self._slots))
        if self._witness is not None:
            self._turn_witness()
        is_free = self.layer in self.free
        if self._outputs is not None:
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            self._outputs.before_layer(self.layer, tensors, is_free=is_free)
        if is_free:
            return nullcontext()
        looks = self._watches or self._casts is not None or self._witness is not None or self.layer in self.whole
        # Not held: they refer to this set.
        hooks = saved_tensors_hooks(self._pack_and_look if looks else self._pack, self._unpack)
        if self._outputs is None:
            return hooks
        return _both(hooks, self._outputs.in_forward(self.layer, self._slots.__len__))

    def _turn_witness(self, *, ends: bool = False) -> None:
        assert self._witness is not None
        layer = self.layer if ends else self.layer - 1
        if layer >= 0 and (name := self._witness.end_layer()) is not None:
            raise self._mismatch(layer, f"would change its attribute {name} again, which F did not in its first step")
        if not ends and self.layer not in self.whole:
            self._witness.start_layer(self.layer)

    def refuse_hooks(self, _: str = "") -> NoReturn:
        """The layer that F is in cannot go on with hooks."""
        self.hooks_refused = True
        raise NeedsGradientInside

    def _pack(self, tensor: Tensor) -> Slot:
        # Here and below, for each tensor that is saved: as few lines as can be.
        slot, slots = Slot(), self._slots
        slot.number = len(slots)
        slots.append(slot)
        self._signatures.append((tensor.shape, tensor.dtype, type(tensor.grad_fn)))
        return slot

    def _pack_and_look(self, tensor: Tensor) -> Slot:
        slot = self._pack(tensor)
        if self._casts is not None:
            self._casts.see(tensor)
        is_whole = self.layer in self.whole
        if self.is_filled or is_whole:
            slot.fill(tensor)
        elif self._witness is not None:
            self._witness.see(slot.number, tensor)
        if (self._watches or is_whole) and tensor.layout is torch.strided and not tensor.is_nested:
            alias = _version_alias(tensor) if slot.tensor is None else slot.tensor
            self._aliases.append((slot.number, tensor._version, alias))
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        tensor = slot.tensor
        if self._is_in_forward:
            layer = self._layer_of(slot.number)
            if tensor is None:
                self.wanted = layer
                raise NeedsGradientInside
            self.reads_from[self.layer] = min(layer, self.reads_from.get(self.layer, layer))
        assert tensor is not None, f"B reads an empty slot of {self._name_of_slot(slot)}: its R has not run"
        if tensor._version != slot.version:
            raise saved_changed(self._name_of_slot(slot), tensor.shape, "before B read it")
        return tensor

    def end_forward(
        self, changing: Set[int] = frozenset(), *, needed: bool = True, size: SetSize | None = None
    ) -> None:
        """F is done: nothing that it saved may have changed since. `needed`: whether B will read anything.

        `changing` are storages that a later F changes (buffers): what a kept set has of them is copied now. `size` is that of sets
        of this kind.

        Raises:
            SavedTensorChanged: with the layer, and the shape of the tensor.
        """
        for number, version, alias in self._aliases:
            if alias._version != version:
                where = self._name_of(self._layer_of(number))
                raise saved_changed(where, self._signatures[number][0], "later in the same forward")
        self._aliases.clear()
        self._is_in_forward = False
        self._starts.append(len(self._slots))
        if self._witness is not None:
            self._turn_witness(ends=True)
        if changing:
            self._copy_what_changes(changing)
        if needed:
            self._end = self._last_slot_of_recompute() if self.whole else len(self._slots)
        if self._outputs is not None:
            self._outputs.end_forward(self.whole, self._end)
        if self.is_filled or self.whole - self.free:
            self._count(size or SetSize())
        if self.keep or not needed:
            self._slots.clear()  # the graph owns them; each goes with its node

    def _last_slot_of_recompute(self) -> int:
        """The number after that of the last slot that R fills, or proves."""
        spans = enumerate(zip(self._starts, self._starts[1:]))
        return max((end for layer, (start, end) in spans if layer not in self.whole and start < end), default=0)

    def _copy_what_changes(self, changing: Set[int]) -> None:
        copies: Storages = {}  # of each storage one, so that views still share it
        for slot in self._slots:
            key = slot.storage()
            if slot.tensor is not None and key in changing:
                if key not in copies:
                    copies[key] = copy_of_storage(slot.tensor)
                slot.fill(view_into(copies[key], slot.tensor))

    def _count(self, size: SetSize) -> None:
        """Tell the meter of what fills the slots, for as long as there is one of them; with a split backward of each by itself."""
        filled = [(slot, slot.tensor) for slot in self._slots if slot.tensor is not None and slot.counted is None]
        tensors = (tensor for _, tensor in filled)
        if self._split:
            self.num_bytes = self._meter.uncounted_bytes(tensors)
            for slot, tensor in filled:
                slot.counted = CountedBytes(self._meter, 0, (tensor,))
            return
        counted = size.counted(self._meter, tensors)
        self.num_bytes = counted.num_bytes
        for slot, _ in filled:
            slot.counted = counted

    # R ----------------------------------------------------------------------------------------------------------

    @property
    def needs_recompute(self) -> bool:
        """Whether there is a slot that R has to fill, or to prove."""
        return self._end > 0

    def last_signatures(self) -> Sequence[Signature]:
        """Of what the last layer that R fills slots of has saved."""
        start = self._starts[bisect_right(self._starts, self._end - 1) - 1] if self._end else 0
        return self._signatures[start : self._end]

    def start_recompute(self, stop: Stop = Stop.AT_SLOT) -> None:
        """R begins, and ends where `stop` says; where there is a proof, with the stage."""
        self.layer, self._filled = -1, 0
        self._most = len(self._slots)
        self._stop = Stop.AT_END if self.proof else stop

    def start_layer_again(self) -> AbstractContextManager[object] | None:
        """R goes on to its next layer, which runs under what this returns; None: F has kept its set, so that it does not run.

        Raises:
            SetComplete: R need not go on.
            RecomputeMismatch: the layer before did something else than in F.
        """
        if self.layer >= 0:
            self._end_layer_of_recompute()
        if self._stop is Stop.AT_LAYER and self._filled >= self._end:
            raise SetComplete
        self.layer += 1
        if self.layer in self.whole:
            self._filled = self._starts[self.layer + 1]
            return None
        pack = self._fill if self.proof is None and self._casts is None else self._compare
        if self._outputs is None:
            return saved_tensors_hooks(pack, self._unpack_in_recompute)
        hooks = saved_tensors_hooks(beside_mode(pack), self._unpack_in_recompute)
        return _both(hooks, self._outputs.in_recompute(self.layer, self.fail))

    def _fill(self, tensor: Tensor) -> None:
        number = self._filled
        if number >= self._most or (tensor.shape, tensor.dtype, type(tensor.grad_fn)) != self._signatures[number]:
            self._check_signature(tensor)
        slot = self._slots[number]
        # Detached: the tensor may be an output of the node that owns this slot, and a cycle would keep both alive.
        slot.tensor = tensor.detach()
        slot.version = tensor._version
        self._filled = number + 1
        if self._filled == self._end and self._stop is Stop.AT_SLOT:
            self._is_complete, self._most = True, 0
            raise SetComplete

    def _compare(self, tensor: Tensor) -> None:
        """As `_fill`, for a proof, or where casts are told."""
        if self._casts is not None:
            self._casts.see_again(tensor)
        if self.proof is None:
            self._fill(tensor)
            return
        self._check_signature(tensor)
        self.proof.bring(self._slots[self._filled], tensor)
        self._filled += 1
        if self._filled == self._end:
            self.proof.at_last_slot()

    def _check_signature(self, tensor: Tensor) -> None:
        """R saves this: is it what F saved next?"""
        if self._is_complete:
            raise SetComplete
        signature = tensor.shape, tensor.dtype, type(tensor.grad_fn)
        if self._filled >= len(self._slots):
            self.fail(f"saves one tensor more than in F: {as_text(signature)}")
        expected = self._signatures[self._filled]
        if signature != expected and (signature[:2] != expected[:2] or signature[2].__name__ != _ENTERED):
            self.fail(f"saves {as_text(signature)}, in F it was {as_text(expected)}")

    def _unpack_in_recompute(self, _: Any) -> NoReturn:
        if self._is_complete:
            raise SetComplete
        self.fail("takes a gradient inside the layer, which F did not")

    def raise_what_was_meant(self) -> None:
        """A layer has raised something, or returned: what the hooks had raised through it before counts.

        Raises:
            SetComplete, RecomputeMismatch
        """
        if self._is_complete:
            raise SetComplete
        if self._failure is not None:
            raise self._failure

    def is_what_was_meant(self, error: BaseException) -> bool:
        """Whether R is complete, although a layer has raised `error`.

        Raises:
            RecomputeMismatch
        """
        if not self._is_complete and self._failure is not None:
            raise self._failure
        if not self._is_complete and refuses_hooks(error):
            self.fail("takes a gradient inside the layer (torch.func), which F did not")
        return self._is_complete

    def _end_layer_of_recompute(self) -> None:
        if self._is_complete or self._failure is not None:
            self.raise_what_was_meant()
        expected = self._starts[self.layer + 1]
        if self._filled < expected:
            self._fail_because_it_ended()
        if self._filled > expected:
            self.fail(f"saves {self._filled - expected} tensors more than in F")
        if self._outputs is not None and self.layer not in self.whole and (left := self._outputs.left(self.layer)):
            self.fail(f"ended without {left} of the operations whose outputs F kept")
        if self.proof is not None:
            self.proof.at_layer_end(self._meter, last=self._starts[self.layer] < self._end <= expected)

    def end_recompute(self, own: Set[int] = frozenset(), size: SetSize | None = None) -> None:
        """R is done: every slot is full and what fills it has not changed. `size` is that of sets of this kind.

        `own` are storages that stood in for buffers: what looks into them shares a version with the buffer, which other
        microbatches change.

        Raises:
            RecomputeMismatch: R ended before it had saved what F saved; or the proof found another value.
            SavedTensorChanged: with the layer, and the shape of the tensor.
        """
        if not self._is_complete and self.layer >= 0:
            self._end_layer_of_recompute()
        if self._filled < self._end:
            self._fail_because_it_ended()
        if self.proof is None:
            self._check_filled()
            for slot in self._slots if own else ():
                if slot.tensor is not None and slot.storage() in own:
                    slot.fill(slot.tensor.data)
            self._count(size or SetSize())
        else:
            if (difference := self._difference()) is not None:
                raise difference
            self.proof.clear()
        if self._outputs is not None:
            self.set_bytes_before = self.saved_outputs_bytes
        self._slots.clear()

    def _check_filled(self) -> None:
        for slot in self._slots:
            if slot.tensor is not None and slot.tensor._version != slot.version:
                raise saved_changed(self._name_of_slot(slot), slot.tensor.shape, "later in the same recompute")
        if self._witness is None:
            return
        layer = self._witness.first_difference(self._slots)
        if layer is not None:
            raise self._mismatch(layer, "saves other values than F did, which it did not in its first step")

    def drop(self) -> None:
        """The step has failed: hold nothing any more."""
        self._slots.clear()
        self._aliases.clear()
        self._failure = None
        if self.proof is not None:
            self.proof.clear()
        self.start_backward()

    # B ----------------------------------------------------------------------------------------------------------

    def start_backward(self) -> None:
        """B begins, and so R has ended: on a GPU no operation of R reads what is let go any more when its memory is given away."""
        if self._outputs is not None:
            self._outputs.drop()

    def assert_closed(self) -> None:
        """B is done: whatever is left of the set belongs to the graph, which goes."""
        assert not self._slots, f"{len(self._slots)} slots are still held after their B"
        assert not self._aliases, f"{len(self._aliases)} aliases are still held after their B"
        kept = 0 if self._outputs is None else self._outputs.num_bytes
        assert not kept, f"{kept} bytes of outputs are still kept after their B"

    # What fills the slots ---------------------------------------------------------------------------------------

    def saved_by(self, layer: int) -> list[Tensor]:
        """What F has filled the slots of a layer with, in order."""
        slots = self._slots[self._starts[layer] : self._end_of(layer)]
        return [slot.tensor for slot in slots if slot.tensor is not None]

    def storages(self) -> set[int]:
        """Of what F has filled the slots with."""
        return {slot.storage() for slot in self._slots} - {0}

    def tensors(self) -> list[Tensor]:
        """What F has filled the slots with, and what it keeps besides."""
        kept = [] if self._outputs is None else self._outputs.tensors()
        return kept + [slot.tensor for slot in self._slots if slot.tensor is not None]

    @property
    def outputs_bytes(self) -> int:
        """Bytes of outputs that are kept for R, whether or not they are saved as well."""
        return 0 if self._outputs is None else self._outputs.num_bytes

    @property
    def saved_outputs_bytes(self) -> int:
        """Of these, what the slots have as well, which are filled."""
        if self._outputs is None:
            return 0
        return self._outputs.bytes_in({slot.storage() for slot in self._slots})

    def _end_of(self, layer: int) -> int:
        """The number after that of the layer's last slot."""
        return self._starts[layer + 1] if layer + 1 < len(self._starts) else len(self._signatures)

    def _layer_of(self, slot: int) -> int:
        return bisect_right(self._starts, slot) - 1

    def _name_of_slot(self, slot: Slot) -> str:
        return self._name_of(self._layer_of(slot.number))

    # R went another way -----------------------------------------------------------------------------------------

    def fail(self, what: str, layer: int | None = None) -> NoReturn:
        """R of the layer that it is in did something else than F. Where a layer before had other values already, those are the cause."""
        if self._failure is None:
            self._failure = self._difference() or self._mismatch(self.layer if layer is None else layer, what)
        raise self._failure

    def _fail_because_it_ended(self) -> NoReturn:
        missing = as_text(self._signatures[self._filled])
        self.fail(f"ended without saving {missing}, which F saved", self._layer_of(self._filled))

    def _difference(self) -> RecomputeMismatch | SavedTensorChanged | None:
        """The first value that the proof found to be another than in F, if there is one."""
        found = None if self.proof is None else self.proof.first_difference()
        if found is None:
            return None
        slot, how = found
        if slot.tensor is not None and slot.tensor._version != slot.version:
            where, shape = self._name_of_slot(slot), slot.tensor.shape
            return saved_changed(where, shape, "after its forward, before it was recomputed")
        what = as_text(self._signatures[slot.number])
        return self._mismatch(self._layer_of(slot.number), f"saves {what} with other values: {how}")

    def _mismatch(self, layer: int, what: str) -> RecomputeMismatch:
        return RecomputeMismatch(
            f"{self._name_of(layer)}: the recompute {what}. A layer that is recomputed must do the same operations on the same "
            "values both times: look for a counter, a cache, random numbers of its own or other state of the layer that F "
            "changes, or name it in recompute.keep_layers"
        )


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def _version_alias(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of `tensor` and none of its memory."""
    alias = tensor.detach()
    alias.data = alias.new_empty(0)
    return alias
