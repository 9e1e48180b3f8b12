"""Late-bound sets: F leaves an empty slot for each tensor that B will need, R fills the slots, B reads them.

Autograd runs a backward node on the stream on which its forward ran, so a graph that R built would take B to R's
stream. Here B runs on the graph of F; only the tensors come from R, whose own graph is thrown away.

    F   pack    -> Slot()            [1] an empty slot goes into the graph; the tensor is not held
    R   pack(t) -> slot.fill(t)      [2] the same layers save the same tensors in the same order
    B   unpack  -> slot.tensor       [3] read, not emptied: a node may read twice; the slot goes when its node goes

Saved-tensor hooks switch off autograd's own check that no saved tensor was changed in place, so it is made here: at the
end of F, at the end of R, and when B reads.

A layer may catch what is raised through it. So what the hooks raise to get out of a layer is no Exception, and what they want
is noted as well: whoever ran the layer asks for it when the layer has returned.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.meter import ActivationMeter, CountedBytes, SetSize
from pipetrain.stage.proof import Proof, Stop
from pipetrain.stage.selective import KeptOutputs, Selection
from pipetrain.stage.tensor_copies import Storages, copy_of_storage, storage_key, view_into
from pipetrain.stage.witness import Witness

Signature = tuple[torch.Size, torch.dtype, type]  # of a saved tensor: the last is the class of the node that made it


class NeedsGradientInside(BaseException):
    """A layer took a gradient inside its forward: saved tensors are wanted while F still runs, and their slots are empty."""


class SetComplete(BaseException):
    """The last slot is full: the rest of R would compute what nobody reads."""


class RecomputeMismatch(RuntimeError):
    """R did not do what F did."""


class SavedTensorChanged(RuntimeError):
    """A tensor was changed in place after it had been saved for backward."""


class LayerRefused(RuntimeError):
    """A layer does in its forward what no stage can give it; the message says what to do."""


# The node of what R begins with behind a layer that it passes over, which in F was that layer's.
_ENTERED = "GateBackward"


class Slot:
    """The place of one saved tensor in the graph of F; empty until it is filled by F (kept set) or by R.

    `number` counts the slots of a set, `layer` is the layer of the stage that saved the tensor.
    """

    __slots__ = ("counted", "layer", "number", "tensor", "version")

    def __init__(self, layer: int = 0, number: int = 0) -> None:
        self.tensor: Tensor | None = None
        self.version = 0
        self.layer = layer
        self.number = number
        self.counted: CountedBytes | None = None

    def fill(self, tensor: Tensor) -> None:
        # Detached: the tensor may be an output of the node that will own this slot, and a cycle would keep both alive.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def storage(self) -> int:
        """The identity of the tensor's storage; 0 where it has none of its own."""
        return 0 if self.tensor is None else storage_key(self.tensor)


class _Phase(enum.Enum):
    FORWARD = enum.auto()
    WAITING = enum.auto()
    RECOMPUTE = enum.auto()


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
        self.wanted: Slot | None = None  # an empty slot that a layer has read in F
        self.hooks_refused = False  # the layer that F is in has asked for no hooks (torch.func)
        self.reads_from: dict[int, int] = {}  # a layer that read slots in F -> the first layer of which it read one
        self._fills = keep or proof is not None
        self._split = split
        self._casts = casts
        self._name_of = name_of
        self._meter = meter
        self._phase = _Phase.FORWARD
        self._slots: list[Slot] = []
        self._signatures: list[Signature] = []
        self._witness = witness
        self._watches = watches or self._fills or witness is not None
        self._witnesses: list[tuple[int, int, Tensor]] = []  # slot number, version, alias without storage
        self.num_bytes = 0  # of what fills the slots
        self._starts: list[int] = []  # number of the first slot of each layer
        self._whole: set[int] = set()  # layers whose saved tensors F keeps: R brings nothing of theirs
        self._free: set[int] = set()  # of these, those that run without hooks
        self._filled = 0
        self._end = 0  # as many slots are filled when R is complete
        self._stop = Stop.AT_SLOT
        self._is_complete = False
        self._failure: RuntimeError | None = None
        self._layer = -1  # that F or R is in
        # Outputs that R does not compute; None: it computes all, or there is no R.
        self._outputs = None if selection is None or keep else KeptOutputs(selection, meter)
        self.set_bytes_before = 0  # of the set that R brings, what was held already: kept outputs that it saved

    def __len__(self) -> int:
        """How many slots R has to fill, or to prove."""
        return sum(slot.layer not in self._whole for slot in self._slots)

    def start_layer(self) -> None:
        """F or R goes on to its next layer; in R, the one before must have saved as many tensors as in F.

        Raises:
            SetComplete: R need not go on.
            RecomputeMismatch: the layer before did something else than in F.
        """
        if self._phase is _Phase.FORWARD:
            self._layer += 1
            self._starts.append(len(self._slots))
            if self._witness is not None:
                self._witness.end_layer()
            return
        self.raise_what_was_meant()
        self._end_layer_of_recompute()
        if self._stop is Stop.AT_LAYER and self._filled >= self._end:
            raise SetComplete
        self._layer += 1
        if self._layer in self._whole:
            self._filled = self._end_of(self._layer)

    def hooks(self) -> AbstractContextManager[object]:
        """The hooks under which a layer runs, in F and in R; and what keeps outputs in F, and gives them out in R."""
        if self._phase is _Phase.FORWARD:
            hooks = saved_tensors_hooks(self._pack_in_forward, self._unpack)
            if self._outputs is None:
                return hooks
            return _both(hooks, self._outputs.in_forward(self._layer, self._slots.__len__))
        if self._outputs is None:
            return saved_tensors_hooks(self._pack_in_recompute, self._unpack_in_recompute)
        hooks = saved_tensors_hooks(self._pack_beside_mode, self._unpack_in_recompute)
        return _both(hooks, self._outputs.in_recompute(self._layer, self.fail))

    def before_layer(self, given: Sequence[Tensor]) -> None:
        """F comes to a layer that gets `given`."""
        if self._outputs is not None:
            self._outputs.before_layer(self._layer, given, is_free=self._layer in self._free)

    def refuse_hooks(self, _: str = "") -> NoReturn:
        """The layer that F is in cannot go on with hooks: it is to start again without."""
        self.hooks_refused = True
        raise NeedsGradientInside

    def is_whole(self, layer: int) -> bool:
        """Whether this layer's saved tensors stay in the graph of F, so that it runs without hooks in R as well."""
        return layer in self._whole

    # F ----------------------------------------------------------------------------------------------------------

    def is_free(self, layer: int) -> bool:
        """Whether this layer runs without hooks in F."""
        return layer in self._free

    def keep_whole(self, layers: Set[int], free: Set[int]) -> None:
        """The saved tensors of these layers stay in the graph of F, as they are."""
        self._whole |= layers
        self._free |= free

    def _pack_in_forward(self, tensor: Tensor) -> Slot:
        # Here and below, for each tensor that is saved: as few lines as can be.
        slots = self._slots
        slot = Slot(self._layer, len(slots))
        slots.append(slot)
        self._signatures.append((tensor.shape, tensor.dtype, type(tensor.grad_fn)))
        if self._casts is not None:
            self._casts.see(tensor)
        if self._watches or self._layer in self._whole:
            self._watch(slot, tensor)
        return slot

    def _watch(self, slot: Slot, tensor: Tensor) -> None:
        if self._fills or self._layer in self._whole:
            slot.fill(tensor)
        elif self._witness is not None:
            self._witness.see(slot.number, tensor)
        if tensor.layout is torch.strided and not tensor.is_nested:
            witness = _witness(tensor) if slot.tensor is None else slot.tensor
            self._witnesses.append((slot.number, tensor._version, witness))

    def _unpack(self, slot: Slot) -> Tensor:
        if self._phase is _Phase.FORWARD:
            if slot.tensor is None:
                self.wanted = slot
                raise NeedsGradientInside
            self.reads_from[self._layer] = min(slot.layer, self.reads_from.get(self._layer, slot.layer))
        tensor = slot.tensor
        assert tensor is not None, f"B reads an empty slot of {self._name_of(slot.layer)}: its R has not run"
        if tensor._version != slot.version:
            raise _changed(self._name_of(slot.layer), tensor, "before B read it")
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
        self._check_witnesses("later in the same forward")
        self._phase = _Phase.WAITING
        if self._witness is not None:
            self._witness.end_layer()
        for reader, first in self.reads_from.items():
            self._whole.update(range(first, reader + 1))
            self._free.update(range(first, reader + 1))
        if changing:
            self._copy_what_changes(changing)
        if self._outputs is not None:
            self._outputs.end_forward(self._whole, self._end_of_recompute() if needed else 0)
        if self._fills or self._whole - self._free:
            self._count(size)
        if self.keep or not needed:
            self._slots.clear()  # the graph owns them; each goes with its node

    def _copy_what_changes(self, changing: Set[int]) -> None:
        copies: Storages = {}  # of each storage one, so that views still share it
        for slot in self._slots:
            key = slot.storage()
            if slot.tensor is not None and key in changing:
                if key not in copies:
                    copies[key] = copy_of_storage(slot.tensor)
                slot.fill(view_into(copies[key], slot.tensor))

    def _count(self, size: SetSize | None) -> None:
        """Tell the meter of what fills the slots, for as long as there is one of them; with a split backward of each by itself."""
        slots = [slot for slot in self._slots if slot.tensor is not None and slot.counted is None]
        if self._split:
            tensors = [slot.tensor for slot in slots if slot.tensor is not None]
            self.num_bytes = self._meter.uncounted_bytes(tensors)
            for slot, tensor in zip(slots, tensors):
                slot.counted = CountedBytes(self._meter, 0, (tensor,))
            return
        counted = (size or SetSize()).counted(self._meter, (slot.tensor for slot in slots if slot.tensor is not None))
        self.num_bytes = counted.num_bytes
        for slot in slots:
            slot.counted = counted

    # R ----------------------------------------------------------------------------------------------------------

    def start_recompute(self, stop: Stop = Stop.AT_SLOT) -> None:
        """R begins, and ends where `stop` says; where there is a proof, with the stage."""
        self._phase = _Phase.RECOMPUTE
        self._layer, self._filled = -1, 0
        self._stop = Stop.AT_END if self.proof else stop
        self._end = self._end_of_recompute()

    def _end_of_recompute(self) -> int:
        """The number after that of the last slot that R fills, or proves."""
        return max((slot.number + 1 for slot in self._slots if slot.layer not in self._whole), default=0)

    def _pack_in_recompute(self, tensor: Tensor) -> None:
        if self._is_complete:
            raise SetComplete
        number = self._filled
        found = tensor.shape, tensor.dtype, type(tensor.grad_fn)
        if number >= len(self._slots) or found != self._signatures[number]:
            self._fail_because_of(number, found)
        slot = self._slots[number]
        if self._casts is not None:
            self._casts.see_again(tensor)
        if self.proof is None:
            # Detached: the tensor may be an output of the node that owns this slot, and a cycle would keep both alive.
            slot.tensor = tensor.detach()
            slot.version = tensor._version
        else:
            self.proof.bring(slot, tensor)
        self._filled = number + 1
        if self._filled == self._end:
            self._at_last_slot()

    def _pack_beside_mode(self, tensor: Tensor) -> None:
        with torch._C._DisableTorchDispatch():  # under a mode `detach` takes eight times as long
            self._pack_in_recompute(tensor)

    def _at_last_slot(self) -> None:
        if self.proof is not None:
            self.proof.at_last_slot()
        if self._stop is Stop.AT_SLOT:
            self._is_complete = True
            raise SetComplete

    def _unpack_in_recompute(self, _: Any) -> NoReturn:
        if self._is_complete:
            raise SetComplete
        self._fail(self._layer, "takes a gradient inside the layer, which F did not")

    def raise_what_was_meant(self) -> None:
        """A layer has raised something, or returned: what the hooks had raised through it before counts.

        Raises:
            SetComplete, RecomputeMismatch
        """
        if self._is_complete:
            raise SetComplete
        if self._failure is not None:
            raise self._failure

    def fail(self, what: str) -> NoReturn:
        """R of the layer that it is in did something else than F."""
        self._fail(self._layer, what)

    def _end_layer_of_recompute(self) -> None:
        if self._layer < 0:
            return
        expected = self._end_of(self._layer)
        if self._filled < expected:
            self._fail_because_it_ended()
        if self._filled > expected:
            self._fail(self._layer, f"saves {self._filled - expected} tensors more than in F")
        if self._outputs is not None and self._layer not in self._whole and (left := self._outputs.left(self._layer)):
            self._fail(self._layer, f"ended without {left} of the operations whose outputs F kept")
        if self.proof is not None:
            self.proof.at_layer_end(self._meter, last=self._starts[self._layer] < self._end <= expected)

    def end_recompute(self, own: Set[int] = frozenset(), size: SetSize | None = None) -> None:
        """R is done: every slot is full and what fills it has not changed. `size` is that of sets of this kind.

        `own` are storages that stood in for buffers: what looks into them shares a version with the buffer, which other
        microbatches change.

        Raises:
            RecomputeMismatch: R ended before it had saved what F saved; or the proof found another value.
            SavedTensorChanged: with the layer, and the shape of the tensor.
        """
        if not self._is_complete:
            self.raise_what_was_meant()
            self._end_layer_of_recompute()
        if self._filled < self._end:
            self._fail_because_it_ended()
        if (difference := self._difference()) is not None:
            raise difference
        for slot in self._slots if self.proof is None else ():
            if slot.tensor is not None and slot.tensor._version != slot.version:
                raise _changed(self._name_of(slot.layer), slot.tensor, "later in the same recompute")
        changed = (
            None if self._witness is None or self.proof is not None else self._witness.first_difference(self._slots)
        )
        if changed is not None:
            what = _describe(self._signatures[changed.number])
            raise self._mismatch(changed.layer, f"saves {what} with other values, which it did not in its first step")
        for slot in self._slots if own else ():
            if slot.tensor is not None and slot.storage() in own:
                slot.fill(slot.tensor.data)
        if self.proof is None:
            self._count(size)
        self._phase = _Phase.WAITING
        self.set_bytes_before = self.saved_outputs_bytes
        self._slots.clear()
        if self.proof is not None:
            self.proof.clear()

    def drop(self) -> None:
        """The step has failed: hold nothing any more."""
        self._slots.clear()
        self._witnesses.clear()
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
        assert not self.outputs_bytes, f"{self.outputs_bytes} bytes of outputs are still kept after their B"
        assert not self._witnesses, f"{len(self._witnesses)} witnesses are still held after their B"

    # --------------------------------------------------------------------------------------------------------------

    @property
    def is_filled(self) -> bool:
        """Whether F has filled the slots."""
        return self._fills

    def saved_by(self, layer: int) -> list[Tensor]:
        """What F has filled the slots of a layer with, in order."""
        return [
            slot.tensor for slot in self._slots[self._starts[layer] : self._end_of(layer)] if slot.tensor is not None
        ]

    def bytes_of(self, layer: int) -> int:
        """Of what F has filled the slots of a layer with."""
        return self._meter.uncounted_bytes(self.saved_by(layer))

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
        return self._starts[layer + 1] if layer + 1 < len(self._starts) else len(self._slots)

    def _check_witnesses(self, when: str) -> None:
        for number, version, witness in self._witnesses:
            if witness._version != version:
                raise _changed(self._layer_of(number), self._signatures[number], when)
        self._witnesses.clear()

    def _layer_of(self, number: int) -> str:
        return self._name_of(bisect_right(self._starts, number) - 1)

    def _fail_because_of(self, number: int, found: Signature) -> None:
        if number >= len(self._slots):
            self._fail(self._layer, f"saves one tensor more than in F: {_describe(found)}")
        expected = self._signatures[number]
        if found[:2] != expected[:2] or found[2].__name__ != _ENTERED:
            self._fail(self._layer, f"saves {_describe(found)}, in F it was {_describe(expected)}")

    def _fail_because_it_ended(self) -> NoReturn:
        layer = bisect_right(self._starts, self._filled) - 1
        self._fail(layer, f"ended without saving {_describe(self._signatures[self._filled])}, which F saved")

    def _fail(self, layer: int, what: str) -> NoReturn:
        """R went another way. Where a layer before had other values already, those are the cause."""
        if self._failure is None:
            self._failure = self._difference() or self._mismatch(layer, what)
        raise self._failure

    def _difference(self) -> RecomputeMismatch | SavedTensorChanged | None:
        """The first value that the proof found to be another than in F, if there is one."""
        found = None if self.proof is None else self.proof.first_difference()
        if found is None:
            return None
        slot, how = found
        if slot.tensor is not None and slot.tensor._version != slot.version:
            return _changed(self._name_of(slot.layer), slot.tensor, "after its forward, before it was recomputed")
        return self._mismatch(slot.layer, f"saves {_describe(self._signatures[slot.number])} with other values: {how}")

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


def _describe(signature: Signature) -> str:
    shape, dtype, node = signature
    made = "" if node is NoneType else f" made by {node.__name__.removesuffix('0')}"
    return f"a tensor {list(shape)} {str(dtype).removeprefix('torch.')}{made}"


def _witness(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of `tensor` and none of its memory."""
    alias = tensor.detach()
    if tensor.layout is not torch.strided:  # cannot be empty; they are buffers, as a rule, which stay in any case
        return alias
    alias.data = alias.new_empty(0)
    return alias


def _changed(where: str, tensor: Tensor | Signature, when: str) -> SavedTensorChanged:
    shape = list(tensor.shape if isinstance(tensor, Tensor) else tensor[0])
    return SavedTensorChanged(
        f"{where}: a tensor {shape} saved for backward was changed in place {when}. Its gradient would be wrong: "
        "use the operation that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
    )


# What torch says, who looks by itself where there are no hooks.
_CHANGED_IN_PLACE = "modified by an inplace operation"


def changed_node(roots: Iterable[GradientEdge]) -> Node | None:
    """The node below `roots`, which a backward without hooks has not passed, of whose saved tensors one was changed in place."""
    todo, walked = [root.node for root in roots], set[Node]()
    while todo:
        node = todo.pop()
        if node in walked:
            continue
        walked.add(node)
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError as error:  # also of what the backward has let go of, with another text
                    if _CHANGED_IN_PLACE in str(error):
                        return node
        todo.extend(following for following, _ in node.next_functions if following is not None)
    return None
