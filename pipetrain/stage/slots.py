"""Late-bound sets: F leaves an empty slot for each tensor that B will need; R fills the slots; B reads them.

Autograd runs a backward node on the stream of its forward, so B would run on R's stream if R built the graph. Here B runs on
the graph of F; only the tensors come from R, whose own graph is not used.

    F   pack    -> Slot()            [1] an empty slot goes into the graph; the tensor is not held
    R   pack(t) -> slot.tensor = t   [2] the same layers save the same tensors in the same order
    B   unpack  -> slot.tensor       [3] read, not emptied: a node may read twice; the slot is freed with its node

Saved-tensor hooks switch off autograd's own check that no saved tensor was changed in place. So this module checks it whenever B
reads a slot. It also checks it at the end of an F that fills slots or has `watches`.

A layer may catch what the hooks raise. So the hooks raise a BaseException, which `except Exception` does not catch.
They also note the reason, and the caller of the layer checks for it when the layer has returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.errors import RecomputeMismatch, Signature, mismatch, saved_changed
from pipetrain.stage.meter import ActivationMeter, CountedBytes, SetSize
from pipetrain.stage.proof import Proof
from pipetrain.stage.selective import KeptOutputs, Selection
from pipetrain.stage.tensor_copies import copy_of_storage, storage_key, view_into

if TYPE_CHECKING:
    from pipetrain.stage.recompute import Witness


class NeedsGradientInside(BaseException):
    """A layer takes a gradient inside its forward: while F runs, it reads an empty slot or runs the backward of a split function."""


class Slot:
    """The place of one saved tensor in the graph of F. It is empty until R fills it. In a kept set or layer, or a proof, F does."""

    tensor: Tensor | None = None
    version = 0
    number = 0  # in its set
    counted: CountedBytes | None = None

    def fill(self, tensor: Tensor) -> None:
        # Detached: the tensor may be an output of the node that will own this slot, and a cycle would keep both alive.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def storage(self) -> int:
        """The identity of the tensor's storage; 0 if the slot is empty, or the tensor has no storage of its own (sparse, nested)."""
        return 0 if self.tensor is None else storage_key(self.tensor)


class LateBoundSet:
    """The slots of one (stage, microbatch), from F to B.

    Layers are numbered from 0 within the stage. `keep`: F fills the slots, and no R runs. `proof`: F fills the slots, and R's tensors are
    compared with them. `casts` gets each tensor that is saved under autocast. `selection`: which outputs F keeps for R. `watches`: the end
    of F checks that no saved tensor was changed in place, even if F fills no slots. The meter counts the slots together; with `split`
    (tensors for W outlive I) or `moves` (the set goes to host memory), it counts each slot by itself.
    """

    wanted: int | None = None  # a layer whose empty slot was read in F, by that layer or a later one
    hooks_refused = False  # whether the layer that F is in took a gradient through a split function
    whole: Set[int] = frozenset()  # layers whose saved tensors F keeps: R does not run them
    free: Set[int] = frozenset()  # of these, those that run without saved-tensor hooks
    layer = -1  # the layer that F is in
    end = 0  # R is complete when the slots before this one are filled
    num_bytes = 0  # of the tensors in the slots
    set_bytes_before = 0  # bytes of the set that were held before R: kept outputs that slots hold too
    _is_in_forward = True

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
        moves: bool = False,
    ) -> None:
        self.keep, self.moves = keep, moves
        self.proof = proof
        self.is_filled = keep or proof is not None  # by F
        self.reads_from: dict[int, int] = {}  # a layer that read slots in F -> the first layer whose slots it read
        self._counts_each = split or moves
        self.casts = casts
        self.name_of = name_of
        self.meter = meter
        self.slots: list[Slot] = []
        self.signatures: list[Signature] = []
        self.witness = witness
        self._watches = watches or self.is_filled
        self._looks = self._watches or casts is not None or witness is not None
        self._aliases: list[tuple[int, int, Tensor]] = []  # slot, version, a tensor with the same version counter
        self.starts: list[int] = []  # the first slot of each layer; after F also the number of slots
        # Outputs that R does not compute; None: it computes all, or there is no R.
        self.outputs = None if selection is None or keep else KeptOutputs(selection, meter)

    # F ----------------------------------------------------------------------------------------------------------

    def keep_whole(self, layers: Set[int], free: Set[int]) -> None:
        """Keep the saved tensors of these layers, so that R does not run them. Those in `free` run without hooks."""
        self.whole, self.free = self.whole | layers, self.free | free

    def start_layer(self, value: Any = None) -> AbstractContextManager[object]:
        """Begin F's next layer, whose input is `value`; return the context for its call. Raises RecomputeMismatch as `end_forward`."""
        self.layer += 1
        self.starts.append(len(self.slots))
        is_whole, is_free = self.layer in self.whole, self.layer in self.free
        if self.witness is not None and (name := self.witness.turn(None if is_whole else self.layer)) is not None:
            raise self._attribute_changed(self.layer - 1, name)
        outputs = None
        if self.outputs is not None:
            outputs = self.outputs.in_forward(self.layer, value, self.slots.__len__, is_free=is_free)
        if is_free:
            return nullcontext()
        # Each layer gets new hooks. They refer to this set, so a set that stored them would be part of a cycle.
        hooks = saved_tensors_hooks(self._pack_and_look if self._looks or is_whole else self._pack, self._unpack)
        return hooks if outputs is None else both(hooks, outputs)

    def _attribute_changed(self, layer: int, name: str) -> RecomputeMismatch:
        what = f"would change its attribute {name} again: F has changed it, which it did not do in the first step"
        return mismatch(self.name_of(layer), what)

    def refuse_hooks(self, _: str = "") -> NoReturn:
        self.hooks_refused = True
        raise NeedsGradientInside

    def _pack(self, tensor: Tensor) -> Slot:
        # This method and the next two run for each saved tensor, so they have as few lines as possible.
        slot, slots = Slot(), self.slots
        slot.number = len(slots)
        slots.append(slot)
        self.signatures.append((tensor.shape, tensor.dtype, type(tensor.grad_fn)))
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
        if tensor is None or self._is_in_forward:
            tensor = self._read_before_b(slot)
        if tensor._version != slot.version:
            raise saved_changed(self.name_of_slot(slot), tensor.shape, "before B read it")
        return tensor

    def _read_before_b(self, slot: Slot) -> Tensor:
        assert self._is_in_forward, f"B reads an empty slot of {self.name_of_slot(slot)}: its R has not run"
        layer = self.layer_of(slot.number)
        if slot.tensor is None:
            self.wanted = layer
            raise NeedsGradientInside
        self.reads_from[self.layer] = min(layer, self.reads_from.get(self.layer, layer))
        return slot.tensor

    def end_forward(
        self, changing: Set[int] = frozenset(), *, needed: bool = True, size: SetSize | None = None
    ) -> None:
        """End F: check that no saved tensor was changed in place after it was saved. `needed`: whether B will read any slot.

        `changing`: storages of buffers that a later F may change. If F filled a slot with a tensor in one of them, the slot gets a copy.
        `size`: the size of the sets of this kind, as far as it is known.

        Raises SavedTensorChanged, with the layer and the tensor's shape; RecomputeMismatch: the last layer changed an attribute.
        """
        for number, version, alias in self._aliases:
            if alias._version != version:
                where = self.name_of(self.layer_of(number))
                raise saved_changed(where, self.signatures[number][0], "later in the same forward")
        self._aliases.clear()
        self._is_in_forward = False
        self.starts.append(len(self.slots))
        if self.witness is not None and (name := self.witness.turn(None)) is not None:
            raise self._attribute_changed(self.layer, name)
        if changing:
            self._copy_what_changes(changing)
        if needed:
            self.end = len(self.slots)
        if needed and self.whole:
            spans = enumerate(zip(self.starts, self.starts[1:]))
            self.end = max((end for layer, (start, end) in spans if layer not in self.whole and start < end), default=0)
        if self.outputs is not None:
            self.outputs.end_forward(self.whole, self.end)
        if self.is_filled or self.whole - self.free:
            self.count(size or SetSize())
        if (self.keep and not self.moves) or not needed:
            self.slots.clear()  # the graph owns them; each is freed with its node

    def _copy_what_changes(self, changing: Set[int]) -> None:
        copies: dict[int, UntypedStorage] = {}  # one per storage, so that tensors that shared memory still do
        for slot in self.slots:
            key = slot.storage()
            if slot.tensor is not None and key in changing:
                if key not in copies:
                    copies[key] = copy_of_storage(slot.tensor)
                slot.fill(view_into(copies[key], slot.tensor))

    def count(self, size: SetSize) -> None:
        """Count the tensors in the slots in the meter, until these slots are gone."""
        filled: list[Slot] = []
        tensors: list[Tensor] = []
        for slot in self.slots:
            if slot.tensor is not None and slot.counted is None:
                filled.append(slot)
                tensors.append(slot.tensor)
                if size.is_known and not self._counts_each:
                    break  # B reads the first slot last, so this slot alone can hold the count
        if self._counts_each:
            self.num_bytes = self.meter.uncounted_bytes(tensors)
            for slot, tensor in zip(filled, tensors):
                slot.counted = CountedBytes(self.meter, 0, (tensor,))
            return
        counted = size.counted(self.meter, tensors)
        self.num_bytes = counted.num_bytes
        for slot in filled:
            slot.counted = counted

    # R and B ----------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Drop all slots and tensors: the step has failed, or R has no slot to fill."""
        self.slots.clear()
        self._aliases.clear()
        if self.proof is not None:
            self.proof.clear()
        if self.outputs is not None:
            self.outputs.drop()

    def assert_closed(self) -> None:
        assert not self.slots, f"{len(self.slots)} slots are still held after their B"
        assert not self._aliases, f"{len(self._aliases)} aliases are still held after their B"
        assert self.outputs is None or not self.outputs_bytes, (
            f"{self.outputs_bytes} bytes of outputs are still kept after their B"
        )

    # Tensors in the slots ---------------------------------------------------------------------------------------

    def saved_by(self, layer: int) -> list[Tensor]:
        """The tensors with which F has filled the slots of a layer, in order."""
        end = self.starts[layer + 1] if layer + 1 < len(self.starts) else len(self.slots)
        return [slot.tensor for slot in self.slots[self.starts[layer] : end] if slot.tensor is not None]

    def storages(self) -> set[int]:
        """The storages of the tensors with which F has filled the slots."""
        return {slot.storage() for slot in self.slots} - {0}

    @property
    def outputs_bytes(self) -> int:
        """Bytes of the outputs that F keeps for R, whether or not slots hold them as well."""
        return 0 if self.outputs is None else sum(self.outputs.sizes().values())

    @property
    def saved_outputs_bytes(self) -> int:
        """Bytes of those outputs that filled slots hold as well."""
        sizes = {} if self.outputs is None else self.outputs.sizes()
        return sum(sizes.get(key, 0) for key in {slot.storage() for slot in self.slots} & sizes.keys())

    def layer_of(self, slot: int) -> int:
        return bisect_right(self.starts, slot) - 1

    def name_of_slot(self, slot: Slot) -> str:
        return self.name_of(self.layer_of(slot.number))


@contextmanager
def both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def _version_alias(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    alias.data = alias.new_empty(0)
    return alias
