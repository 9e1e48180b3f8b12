"""Late-bound sets: F leaves an empty slot for each tensor that B will need, R fills the slots, B reads them.

Autograd runs a backward node on the stream on which its forward ran, so a graph that R built would take B to R's
stream. Here B runs on the graph of F; only the tensors come from R, whose own graph is thrown away.

    F   pack    -> Slot()            [1] an empty slot goes into the graph; the tensor is not held
    R   pack(t) -> slot.tensor = t   [2] the same layers save the same tensors in the same order
    B   unpack  -> slot.tensor       [3] read, not emptied: a node may read twice; the slot goes when its node goes

Saved-tensor hooks switch off autograd's own check that no saved tensor was changed in place, so it is made here: at the
end of F, at the end of R, and when B reads.

A layer may catch what is raised through it. So the hooks leave a layer by a BaseException, which `except Exception` does not catch.
They also note the reason, and the caller of the layer checks for it when the layer has returned.
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
from pipetrain.stage.errors import Signature, mismatch, saved_changed
from pipetrain.stage.meter import ActivationMeter, CountedBytes, SetSize
from pipetrain.stage.proof import Proof
from pipetrain.stage.selective import KeptOutputs, Selection
from pipetrain.stage.tensor_copies import Storages, copy_of_storage, storage_key, view_into
from pipetrain.stage.witness import Witness


class NeedsGradientInside(BaseException):
    """A layer took a gradient inside its forward: saved tensors are wanted while F still runs, and their slots are empty."""


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
    `selection` says which outputs F keeps for R. `watches`: F checks at its end that no tensor that it saved has
    changed in place. Without it, R checks this for the slots that it fills, since it runs the same operations. `split`: some of the
    tensors are held until W and the others are not, so the meter counts each slot by itself. `known` are signatures of other sets: sets
    share equal ones, since the garbage collector walks over each that is held.
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
        known: dict[Signature, Signature] | None = None,
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
        self.casts = casts
        self.name_of = name_of
        self.meter = meter
        self.slots: list[Slot] = []
        self.signatures: list[Signature] = []
        self._known: dict[Signature, Signature] = {} if known is None else known
        self.witness = witness
        self._watches = watches or self.is_filled
        self._aliases: list[tuple[int, int, Tensor]] = []  # slot, version, what shares the version counter
        self.starts: list[int] = []  # the first slot of each layer, and when F has ended the number of slots
        self.end = 0  # as many slots are filled when R is complete
        # Outputs that R does not compute; None: it computes all, or there is no R.
        self.outputs = None if selection is None or keep else KeptOutputs(selection, meter)

    # F ----------------------------------------------------------------------------------------------------------

    def keep_whole(self, layers: Set[int], free: Set[int]) -> None:
        """The saved tensors of these layers stay in the graph of F, as they are; `free` are those that run without hooks."""
        self.whole |= layers
        self.free |= free

    def start_layer(self, value: Any = None) -> AbstractContextManager[object]:
        """F comes to its next layer, whose input is `value`. Returns the context in which the layer runs."""
        self.layer += 1
        self.starts.append(len(self.slots))
        if self.witness is not None:
            self._turn_witness()
        is_free = self.layer in self.free
        if self.outputs is not None:
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            self.outputs.before_layer(self.layer, tensors, is_free=is_free)
        if is_free:
            return nullcontext()
        looks = self._watches or self.casts is not None or self.witness is not None or self.layer in self.whole
        # Not held: they refer to this set.
        hooks = saved_tensors_hooks(self._pack_and_look if looks else self._pack, self._unpack)
        if self.outputs is None:
            return hooks
        return both(hooks, self.outputs.in_forward(self.layer, self.slots.__len__))

    def _turn_witness(self, *, ends: bool = False) -> None:
        assert self.witness is not None
        layer = self.layer if ends else self.layer - 1
        if layer >= 0 and (name := self.witness.end_layer()) is not None:
            raise mismatch(
                self.name_of(layer), f"would change its attribute {name} again, which F did not in its first step"
            )
        if not ends and self.layer not in self.whole:
            self.witness.start_layer(self.layer)

    def refuse_hooks(self, _: str = "") -> NoReturn:
        """Stop the layer that F is in, because it cannot run with hooks."""
        self.hooks_refused = True
        raise NeedsGradientInside

    def _pack(self, tensor: Tensor) -> Slot:
        # Here and below, for each tensor that is saved: as few lines as can be.
        slot, slots = Slot(), self.slots
        slot.number = len(slots)
        slots.append(slot)
        signature = tensor.shape, tensor.dtype, type(tensor.grad_fn)
        self.signatures.append(self._known.setdefault(signature, signature))
        return slot

    def _pack_and_look(self, tensor: Tensor) -> Slot:
        slot = self._pack(tensor)
        if self.casts is not None:
            self.casts.see(tensor)
        is_whole = self.layer in self.whole
        if self.is_filled or is_whole:
            slot.fill(tensor)
        elif self.witness is not None:
            self.witness.see(slot.number, tensor)
        if (self._watches or is_whole) and tensor.layout is torch.strided and not tensor.is_nested:
            alias = _version_alias(tensor) if slot.tensor is None else slot.tensor
            self._aliases.append((slot.number, tensor._version, alias))
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        tensor = slot.tensor
        if self._is_in_forward:
            layer = self.layer_of(slot.number)
            if tensor is None:
                self.wanted = layer
                raise NeedsGradientInside
            self.reads_from[self.layer] = min(layer, self.reads_from.get(self.layer, layer))
        assert tensor is not None, f"B reads an empty slot of {self.name_of_slot(slot)}: its R has not run"
        if tensor._version != slot.version:
            raise saved_changed(self.name_of_slot(slot), tensor.shape, "before B read it")
        return tensor

    def end_forward(
        self, changing: Set[int] = frozenset(), *, needed: bool = True, size: SetSize | None = None
    ) -> None:
        """F is done: nothing that it saved may have changed since. `needed`: whether B will read anything.

        `changing` are storages that a later F changes (buffers): what a kept set has of them is copied now. `size` is that of sets
        of this kind.

        Raises SavedTensorChanged: with the layer, and the shape of the tensor.
        """
        for number, version, alias in self._aliases:
            if alias._version != version:
                where = self.name_of(self.layer_of(number))
                raise saved_changed(where, self.signatures[number][0], "later in the same forward")
        self._aliases.clear()
        self._is_in_forward = False
        self.starts.append(len(self.slots))
        if self.witness is not None:
            self._turn_witness(ends=True)
        if changing:
            self._copy_what_changes(changing)
        if needed:
            self.end = self._last_slot_of_recompute() if self.whole else len(self.slots)
        if self.outputs is not None:
            self.outputs.end_forward(self.whole, self.end)
        if self.is_filled or self.whole - self.free:
            self.count(size or SetSize())
        if self.keep or not needed:
            self.slots.clear()  # the graph owns them; each goes with its node

    def _last_slot_of_recompute(self) -> int:
        """The number after that of the last slot that R fills, or proves."""
        spans = enumerate(zip(self.starts, self.starts[1:]))
        return max((end for layer, (start, end) in spans if layer not in self.whole and start < end), default=0)

    def _copy_what_changes(self, changing: Set[int]) -> None:
        copies: Storages = {}  # of each storage one, so that views still share it
        for slot in self.slots:
            key = slot.storage()
            if slot.tensor is not None and key in changing:
                if key not in copies:
                    copies[key] = copy_of_storage(slot.tensor)
                slot.fill(view_into(copies[key], slot.tensor))

    def count(self, size: SetSize) -> None:
        """Tell the meter of what fills the slots, for as long as there is one of them; with a split backward of each by itself."""
        filled = [(slot, slot.tensor) for slot in self.slots if slot.tensor is not None and slot.counted is None]
        tensors = (tensor for _, tensor in filled)
        if self._split:
            self.num_bytes = self.meter.uncounted_bytes(tensors)
            for slot, tensor in filled:
                slot.counted = CountedBytes(self.meter, 0, (tensor,))
            return
        counted = size.counted(self.meter, tensors)
        self.num_bytes = counted.num_bytes
        for slot, _ in filled:
            slot.counted = counted

    # R and B ----------------------------------------------------------------------------------------------------

    @property
    def needs_recompute(self) -> bool:
        """Whether R has to fill a slot, or to prove one."""
        return self.end > 0

    def last_signatures(self) -> Sequence[Signature]:
        """Of what the last layer that R fills slots of has saved."""
        start = self.starts[bisect_right(self.starts, self.end - 1) - 1] if self.end else 0
        return self.signatures[start : self.end]

    def drop(self) -> None:
        """Drop everything that is held, because the step has failed."""
        self.slots.clear()
        self._aliases.clear()
        if self.proof is not None:
            self.proof.clear()
        self.start_backward()

    def start_backward(self) -> None:
        """B begins, so R has ended. On a GPU no operation of R is left that reads the outputs, so their memory may be reused."""
        if self.outputs is not None:
            self.outputs.drop()

    def assert_closed(self) -> None:
        """Assert that B has freed the set; the rest belongs to the graph, which is freed next."""
        assert not self.slots, f"{len(self.slots)} slots are still held after their B"
        assert not self._aliases, f"{len(self._aliases)} aliases are still held after their B"
        kept = 0 if self.outputs is None else self.outputs.num_bytes
        assert not kept, f"{kept} bytes of outputs are still kept after their B"

    # What fills the slots ---------------------------------------------------------------------------------------

    def saved_by(self, layer: int) -> list[Tensor]:
        """What F has filled the slots of a layer with, in order."""
        slots = self.slots[self.starts[layer] : self._end_of(layer)]
        return [slot.tensor for slot in slots if slot.tensor is not None]

    def storages(self) -> set[int]:
        """The storages of the tensors with which F has filled the slots."""
        return {slot.storage() for slot in self.slots} - {0}

    def tensors(self) -> list[Tensor]:
        """The tensors with which F has filled the slots, and the outputs that it keeps."""
        kept = [] if self.outputs is None else self.outputs.tensors()
        return kept + [slot.tensor for slot in self.slots if slot.tensor is not None]

    @property
    def outputs_bytes(self) -> int:
        """Bytes of outputs that are kept for R, whether or not they are saved as well."""
        return 0 if self.outputs is None else self.outputs.num_bytes

    @property
    def saved_outputs_bytes(self) -> int:
        """Of these, what the slots have as well, which are filled."""
        if self.outputs is None:
            return 0
        return self.outputs.bytes_in({slot.storage() for slot in self.slots})

    def _end_of(self, layer: int) -> int:
        """The number after that of the layer's last slot."""
        return self.starts[layer + 1] if layer + 1 < len(self.starts) else len(self.signatures)

    def layer_of(self, slot: int) -> int:
        return bisect_right(self.starts, slot) - 1

    def name_of_slot(self, slot: Slot) -> str:
        return self.name_of(self.layer_of(slot.number))


@contextmanager
def both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def _version_alias(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of `tensor` and none of its memory."""
    alias = tensor.detach()
    alias.data = alias.new_empty(0)
    return alias
