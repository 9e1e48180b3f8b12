"""Late-bound sets: F leaves an empty slot for each tensor that B will need, R fills the slots, B reads them.

Autograd runs a backward node on the stream on which its forward ran, so a graph that R built would take B to R's
stream. Here B runs on the graph of F; only the tensors come from R, whose own graph is thrown away.

    F   pack    -> Slot()            [1] an empty slot goes into the graph; the tensor is not held
    R   pack(t) -> slot.fill(t)      [2] the same layers save the same tensors in the same order
    B   unpack  -> slot.tensor       [3] read, not emptied: a node may read twice; the slot goes when its node goes

Saved-tensor hooks switch off autograd's own check that no saved tensor was changed in place, so it is made here: at the
end of F, at the end of R, and when B reads.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.tensor_copies import Storages, copy_of_storage, storage_key, view_into

Signature = tuple[torch.Size, torch.dtype, str | None]


class NeedsGradientInside(Exception):
    """A layer took a gradient inside its forward: its saved tensors are wanted while F still runs."""


class SetComplete(Exception):
    """The last slot is full: the rest of R would compute what nobody reads."""


class RecomputeMismatch(RuntimeError):
    """R took another path than F."""


class SavedTensorChanged(RuntimeError):
    """A tensor was changed in place after it had been saved for backward."""


class Slot:
    """The place of one saved tensor in the graph of F; empty until it is filled by F (kept set) or by R."""

    __slots__ = ("_key", "_meter", "tensor", "version", "where")

    def __init__(self, where: str, meter: ActivationMeter) -> None:
        self.tensor: Tensor | None = None
        self.version = 0
        self.where = where
        self._meter = meter
        self._key = 0

    def fill(self, tensor: Tensor) -> None:
        # Detached: the tensor may be an output of the node that will own this slot, and a cycle would keep both alive.
        self.tensor = tensor.detach()
        self.version = tensor._version
        self._key = self._meter.hold(self.tensor)

    def storage(self) -> int:
        """The identity of the tensor's storage; 0 where it has none of its own."""
        return 0 if self.tensor is None else storage_key(self.tensor)

    def replace(self, tensor: Tensor) -> None:
        """The same values in another tensor."""
        self.__del__()
        self.fill(tensor)

    def read(self) -> Tensor:
        assert self.tensor is not None, f"B reads an empty slot of {self.where}: its R has not run"
        if self.tensor._version != self.version:
            raise _changed(self.where, self.tensor, "before B read it")
        return self.tensor

    def __del__(self) -> None:
        if self._key:
            self._meter.release(self._key)


class _Phase(enum.Enum):
    FORWARD = enum.auto()
    WAITING = enum.auto()
    RECOMPUTE = enum.auto()


class LateBoundSet:
    """The slots of one (stage, microbatch), from F to B.

    `name_of(layer)` names a layer of the stage in an error; layers are numbered from 0 within the stage. `share(tensor)`
    is called for what R brings where another stream will read it while R's own goes on.
    """

    def __init__(
        self,
        name_of: Callable[[int], str],
        meter: ActivationMeter,
        *,
        keep: bool,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.keep = keep
        self._share = share
        self._name_of = name_of
        self._meter = meter
        self._phase = _Phase.FORWARD
        self._slots: list[Slot] = []
        self._signatures: list[Signature] = []
        self._witnesses: list[tuple[int, int, Tensor]] = []  # slot number, version, alias without storage
        self._starts: list[int] = []  # number of the first slot of each layer
        self._where = ""  # the name of the layer that F is in
        self._filled = 0
        self._layer = -1  # that R is in

    def __len__(self) -> int:
        return len(self._signatures)

    def start_layer(self) -> None:
        """F or R goes on to its next layer; in R, the one before must have saved as many tensors as in F."""
        if self._phase is _Phase.FORWARD:
            self._where = self._name_of(len(self._starts))
            self._starts.append(len(self._slots))
            return
        before, expected = self._layer, self._starts[self._layer + 1]
        self._layer += 1
        if self._filled < expected:
            raise self._ended_early()
        if self._filled > expected:
            raise self._mismatch(before, f"saves {self._filled - expected} tensors more than in F")

    def hooks(self) -> saved_tensors_hooks:
        """The hooks under which a layer runs, in F and in R."""
        if self._phase is _Phase.FORWARD:
            return saved_tensors_hooks(self._pack_in_forward, self._unpack)
        return saved_tensors_hooks(self._pack_in_recompute, _unpack_of_thrown_away_graph)

    # F ----------------------------------------------------------------------------------------------------------

    def _pack_in_forward(self, tensor: Tensor) -> Slot:
        slot = Slot(self._where, self._meter)
        self._slots.append(slot)
        self._signatures.append(_signature(tensor))
        if self.keep:
            slot.fill(tensor)
        witness = _witness(tensor) if slot.tensor is None else slot.tensor
        self._witnesses.append((len(self._slots) - 1, tensor._version, witness))
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        if self._phase is _Phase.FORWARD:
            raise NeedsGradientInside
        return slot.read()

    def end_forward(self, changing: Set[int] = frozenset()) -> None:
        """F is done: nothing that it saved may have changed since.

        `changing` are storages that a later F changes (buffers): what a kept set has of them is copied now.

        Raises:
            SavedTensorChanged: with the layer, and the shape of the tensor.
        """
        self._check_witnesses("later in the same forward")
        self._phase = _Phase.WAITING
        if self.keep:
            if changing:
                self._copy_what_changes(changing)
            self._slots.clear()  # the graph owns them; each goes with its node

    # R ----------------------------------------------------------------------------------------------------------

    def start_recompute(self) -> None:
        self._phase = _Phase.RECOMPUTE

    def _pack_in_recompute(self, tensor: Tensor) -> None:
        number = self._filled
        if number >= len(self._slots):
            raise self._mismatch(self._layer, f"saves one tensor more than in F: {_describe(_signature(tensor))}")
        found, expected = _signature(tensor), self._signatures[number]
        if found != expected:
            raise self._mismatch(self._layer, f"saves {_describe(found)}, in F it was {_describe(expected)}")
        self._slots[number].fill(tensor)
        if self._share is not None:
            self._share(tensor)
        self._witnesses.append((number, tensor._version, self._slots[number].tensor))  # type: ignore[arg-type]
        self._filled += 1
        if self._filled == len(self._slots):
            raise SetComplete

    def _copy_what_changes(self, changing: Set[int]) -> None:
        copies: Storages = {}  # of each storage one, so that views still share it
        for slot in self._slots:
            key = slot.storage()
            if slot.tensor is not None and key in changing:
                if key not in copies:
                    copies[key] = copy_of_storage(slot.tensor)
                slot.replace(view_into(copies[key], slot.tensor))

    def end_recompute(self, own: Set[int] = frozenset()) -> None:
        """R is done: every slot is full and what fills it has not changed.

        `own` are storages that stood in for buffers: what looks into them shares a version with the buffer, which other
        microbatches change.

        Raises:
            RecomputeMismatch: R ended before it had saved what F saved.
            SavedTensorChanged: with the layer, and the shape of the tensor.
        """
        if self._filled < len(self._slots):
            raise self._ended_early()
        self._check_witnesses("later in the same recompute")
        for slot in self._slots if own else ():
            if slot.tensor is not None and slot.storage() in own:
                slot.replace(slot.tensor.data)
        self._phase = _Phase.WAITING
        self._slots.clear()

    # B ----------------------------------------------------------------------------------------------------------

    def assert_closed(self) -> None:
        """B is done: whatever is left of the set belongs to the graph, which goes."""
        assert not self._slots, f"{len(self._slots)} slots are still held after their B"
        assert not self._witnesses, f"{len(self._witnesses)} witnesses are still held after their B"

    # --------------------------------------------------------------------------------------------------------------

    def _check_witnesses(self, when: str) -> None:
        for number, version, witness in self._witnesses:
            if witness._version != version:
                raise _changed(self._layer_of(number), self._signatures[number], when)
        self._witnesses.clear()

    def _layer_of(self, number: int) -> str:
        return self._name_of(bisect_right(self._starts, number) - 1)

    def _ended_early(self) -> RecomputeMismatch:
        layer = bisect_right(self._starts, self._filled) - 1
        return self._mismatch(layer, f"ended without saving {_describe(self._signatures[self._filled])}, which F saved")

    def _mismatch(self, layer: int, what: str) -> RecomputeMismatch:
        return RecomputeMismatch(
            f"{self._name_of(layer)}: the recompute {what}. A layer that is recomputed must do the "
            "same operations on the same shapes both times: look for a counter, a cache or Python's own random numbers, "
            "or keep its set with recompute.mode=never"
        )


def _signature(tensor: Tensor) -> Signature:
    node = tensor.grad_fn
    return tensor.shape, tensor.dtype, None if node is None else node.name()


def _describe(signature: Signature) -> str:
    shape, dtype, op = signature
    made = f" made by {op.removesuffix('0')}" if op else ""
    return f"a tensor {list(shape)} {str(dtype).removeprefix('torch.')}{made}"


def _witness(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of `tensor` and none of its memory."""
    alias = tensor.detach()
    alias.data = alias.new_empty(0)
    return alias


def _changed(where: str, tensor: Tensor | Signature, when: str) -> SavedTensorChanged:
    shape = list(tensor.shape if isinstance(tensor, Tensor) else tensor[0])
    return SavedTensorChanged(
        f"{where}: a tensor {shape} saved for backward was changed in place {when}. Its gradient would be wrong: "
        "use the operation that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
    )


def _unpack_of_thrown_away_graph(_: Any) -> Tensor:
    raise NeedsGradientInside
