"""One stage on one rank: runs F, R, B, I or W of ONE microbatch. It knows no other rank, no order of ops and no stream."""

from __future__ import annotations

import functools
import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.errors import (
    LOSS_WITHOUT_GRADIENT,
    SavedTensorChanged,
    Signature,
    changed_node,
    refuse_gradient_inside,
    saved_changed,
)
from pipetrain.stage.host_set import HostSet
from pipetrain.stage.inspection import FirstLook
from pipetrain.stage.layer_state import NOTHING_BEFORE, Before, LayerState
from pipetrain.stage.leaves import LeafWatch, NameOf
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import (
    AddedLosses,
    Entry,
    Held,
    MicrobatchKind,
    Passed,
    StageInput,
    StageOutput,
    detached,
    lent_storages,
    without_local,
)
from pipetrain.stage.proof import Proof, Stop
from pipetrain.stage.recompute import Recompute, SetComplete, Witness
from pipetrain.stage.selective import Selection, Wanted
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral, DeferredWeights
from pipetrain.stage.split_linear import split_layer
from pipetrain.stage.tensor_copies import storage_key

LossFn = Callable[[Any, Any], Tensor]
_VERSION = attrgetter("_version")
_AS_IS = nullcontext()
_Layer = Callable[[Any], Any]


class Stage:
    """Consecutive layers and, on the last stage, the loss. `first_layer` is the global index of the first one.

    If the layers are one part of a stage (`stage/segments.py`), `part` is its index, and `beside` are all layers of that stage.
    `selective`: operations whose outputs F keeps, so that R need not run them. `keep_layers`: global indices of layers that R does not run.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        *,
        first_layer: int,
        device: torch.device,
        meter: ActivationMeter,
        loss_fn: LossFn | None = None,
        name_of: NameOf = lambda _: None,  # if no rank has the whole model
        selective: Sequence[Wanted] = (),
        keep_layers: Collection[int] = (),
        part: int | None = None,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        self.index, self.layers, self.first_layer, self.loss_fn = index, list(layers), first_layer, loss_fn
        self.set_bytes: dict[int, int] = {}  # microbatch -> bytes of its set, as last seen
        self.stash_bytes: dict[int, int] = {}  # microbatch -> bytes of its stashed input, as last seen
        self.kept_bytes: dict[int, int] = {}  # microbatch -> bytes of outputs that are kept for its R, as last seen
        self.device, self._device_type, self.meter = device, device.type, meter
        self.indices = range(first_layer, first_layer + len(self.layers) + (loss_fn is not None))
        own = {number - first_layer for number in keep_layers} & set(range(len(self.layers)))
        self.kept = own  # indices of layers that R does not run: their saved tensors stay from F to B
        self.free: set[int] = set()  # of these, those that run without saved-tensor hooks
        self.warned: set[tuple[str, int]] = set()  # warnings that were given: the kind, and the index of the layer
        self.state = LayerState(self.layers, loss_fn, self.name_of, device)
        self.casts, self._had_casts = WeightCasts(self.layers, device, meter), False  # True: an F ran under autocast
        self._title = f"stage {index}" if part is None else f"part {part} of stage {index}"
        fewer_cuts = "choose a balance that puts both on one stage" if part is None else "use fewer recompute.segments"
        self._cut_before = self._title, "stage" if part is None else "part", fewer_cuts
        self._held: dict[int, Held] = {}
        self._deferred: dict[int, Deferral] = {}  # microbatch -> weight gradients that wait from I to W
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._entry = Entry(self._anchor, self._title, self.name_of, len(self.indices) - 1, loss_fn is not None)
        # Layers whose graph in R may hold memory besides saved tensors. An inspection that finds none takes the layer out.
        self.may_hold_outside = set(range(len(self.indices)))
        self._stop = Stop.AT_LAYER  # where R may end; the first proof replaces this value, later ones may raise it
        # The signatures of what the last layer saved in the last proof.
        self._proved: Sequence[Signature] = ()
        self._kinds: dict[Hashable, MicrobatchKind] = {}
        self._versions: list[int] | None = None  # of the parameters, at the first F of this step; None between steps
        self._selection = Selection(selective, self.layers, first_layer) if selective else None
        self._leaves = LeafWatch(self.layers, loss_fn, first_layer, self._anchor, name_of, beside)

    @functools.cached_property
    def weights(self) -> DeferredWeights:
        return DeferredWeights(self.layers, self.name_of, self.meter, self.casts)

    @property
    def end(self) -> str:
        """The name, for errors, of the last layer."""
        return f"{self.name_of(len(self.layers) - 1)}, the last of {self._title},"

    def name_of(self, number: int) -> str:
        """The name, for errors, of the layer with this index in the stage, or of the loss."""
        if number >= len(self.layers):
            return "loss_fn"
        return f"layer {self.first_layer + number} ({type(self.layers[number]).__name__})"

    # F ------------------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        given: StageInput,
        *,
        keep: bool,
        prove: bool = False,
        has_backward: bool = True,
        split: bool = False,
        witness: bool = False,
        moves: bool = False,
    ) -> StageOutput:
        """Run F with a graph. With a loss, the output is the weighted loss.

        `keep`: no R will run. `prove`: R will run and be compared with F, so F keeps its set, too. `has_backward`: B will be called; it
        does nothing if the output needs no gradient. `split`: the backward will run as I and W. `witness`: checksums of the tensors that F
        and R save are compared. `moves`: the kept set goes to host memory, and comes back before its B (`host_set`).

        Raises SavedTensorChanged, RecomputeMismatch (a layer begins to change an attribute), LayerRefused, StateChanged, ValueError (the loss has no
        gradient or is no scalar; a layer uses another stage's parameter, or another stage's tensor that needs a gradient).
        """
        assert microbatch not in self._held, f"stage {self.index} runs F{microbatch} twice"
        bytes_before = self.meter.own_bytes
        if self._versions is None:
            self.state.look()
            self._versions = list(map(_VERSION, self.state.parameters))
        has_casts = torch.is_autocast_enabled(self._device_type)
        self._had_casts |= has_casts
        kind = self._kind_of(given, split=split, has_casts=has_casts)
        is_new = prove or not kind.has_run
        held = Held(None if keep else given, len(given.leaves), kind, given.seeds_of(self.indices), has_casts=has_casts)
        before, look = NOTHING_BEFORE, None
        if moves or not (keep and not prove and kind.is_plain):
            before, look = self._open_set(
                held, given, prove=prove, is_new=is_new, split=split, witness=witness, moves=moves
            )
        if is_new:
            with self._leaves.over(given.on_layer) as on_layer:
                outputs = self._run_forward(held, given, before, look, on_layer)
        else:
            outputs = self._run_forward(held, given, before, look, given.on_layer)
        output = detached(outputs, held.roots)
        needed = any(output.wants_gradient)
        if self.loss_fn is not None:
            if has_backward and not needed:
                raise ValueError(LOSS_WITHOUT_GRADIENT)
            held.loss = output.leaves[0].shape, output.leaves[0].dtype
        if held.deferral is not None:
            self.weights.end_forward(held.deferral, held.roots)
        if held.late is not None:
            self._end_forward(held.late, held, (*given.leaves, *output.leaves), needed=needed)
        else:
            # `kept_size` leaves out storages that the set shares with leaves of input and output (`kind.others`): count those here.
            outer = (*given.leaves, *output.leaves)
            held.counted = [(outer[number], self.meter.hold(outer[number])) for number in kind.others]
            held.size = kind.kept_size.counted(self.meter, ())
        kind.has_run = True
        if has_backward or needed:
            self._hold(microbatch, held, bytes_before)
        return output

    def _kind_of(self, given: StageInput, *, split: bool, has_casts: bool) -> MicrobatchKind:
        key: list[Any] = [self.state.sight, split, given.wants_gradient, given.is_shared, has_casts]
        for leaf in given.leaves:
            key += (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf),)
        kind = self._kinds.get(tuple(key))
        if kind is None:
            kind = self._kinds[tuple(key)] = MicrobatchKind()
        return kind

    def _open_set(
        self, held: Held, given: StageInput, *, prove: bool, is_new: bool, split: bool, witness: bool, moves: bool
    ) -> tuple[Before, FirstLook | None]:
        """Make the set of an F that runs under hooks. Returns the state before F, and a `FirstLook` if this F inspects its layers."""
        keep = held.given is None
        held.lent = lent_storages(given.leaves) if moves else frozenset()
        held.late = late = LateBoundSet(
            self.name_of,
            self.meter,
            keep=keep,
            proof=Proof() if prove and not keep else None,
            casts=self.casts if held.has_casts else None,
            selection=self._selection,
            watches=is_new,
            witness=Witness(self.state.watched) if witness and not (prove or keep) and self._may_witness() else None,
            split=split,
            moves=moves,
        )
        if self.kept:
            late.keep_whole(self.free if keep else self.kept, self.free)
        held.deferral = self.weights.begin(late.refuse_hooks) if split else None
        if prove:
            self.state.is_learning = True
        before = self.state.before_forward(recomputed=not keep)
        if not (is_new or before.learning):
            return before, None
        return before, FirstLook(self, given, held.seeds, late, held.deferral, compares=prove and not keep)

    def _may_witness(self) -> bool:
        """Whether F and R may take checksums: not on a GPU (bits may differ, the host waits), nor if later layers change saved tensors."""
        return self.device.type == "cpu" and self._stop is not Stop.AT_END

    def _run_forward(
        self,
        held: Held,
        given: StageInput,
        before: Before,
        look: FirstLook | None,
        on_layer: Callable[[int, Any], None] | None,
    ) -> Any:
        """Run all layers and, on the last stage, the loss."""
        late, recomputed, number = held.late, held.given is not None, 0
        clone = recomputed and before.learning
        value, entered = self._entry.enter(given, held.sink, recomputed=recomputed, clone=clone)
        with AddedLosses(value) as added:
            value = added.value
            try:
                for number, call in enumerate(self._calls(held, given, added, is_forward=True)):
                    if look is not None:
                        look.before(number, value)
                    self.state.seeders[number](held.seeds[number])
                    added.of_layer = []
                    if late is None:
                        value = call(value)
                        node = value.grad_fn if isinstance(value, Tensor) else None
                        last = held.ends[-1] if held.ends else -1
                        held.ends.append(last if node is None else node._sequence_nr())
                    else:
                        with late.start_layer(value):
                            value = call(value)
                        if look is not None or late.whole or late.wanted is not None or late.hooks_refused:
                            self._after_layer(held, late, look, number, value)
                    added.losses += added.of_layer
                    if on_layer is not None:
                        is_loss = number == len(self.layers)
                        on_layer(self.first_layer + number, value if is_loss else added.beside(value))
            except BaseException as error:
                if late is not None:
                    cut_before = self._cut_before if given.wants_gradient else None
                    refuse_gradient_inside(late, self.name_of, number, error, cut_before)
                raise
            if self.loss_fn is None and added.losses:
                value = added.beside(value)
        self._entry.check(entered)
        if before is not NOTHING_BEFORE:
            held.seen = self.state.after_forward(before, recomputed=recomputed)
        return value if isinstance(value, Tensor) else without_local(value)

    def _after_layer(self, held: Held, late: LateBoundSet, look: FirstLook | None, number: int, output: Any) -> None:
        """Called after a layer of an F that runs under hooks: refuse the layer, inspect it, or copy its output for R."""
        if late.wanted is not None or late.hooks_refused:
            refuse_gradient_inside(late, self.name_of, number)
        if look is not None:
            look.after(number)
        # If several kept layers follow each other, R runs none of them: it continues from a copy of the last one's output.
        if held.given is not None and number in late.whole and number + 1 not in late.whole:
            held.passed[number] = Passed.of(output)

    def _calls(self, held: Held, given: StageInput, added: AddedLosses, *, is_forward: bool) -> Sequence[_Layer]:
        """The layers, and the loss, as F or R calls them."""
        calls: list[_Layer] = [*self.layers]
        if held.deferral is not None:
            calls = [split_layer(held.deferral, n, layer, is_forward=is_forward) for n, layer in enumerate(self.layers)]
        if self.loss_fn is not None:
            calls.append(functools.partial(self.weighted_loss, self.loss_fn, given=given, added=added))
        if held.has_casts:
            calls = [self.casts.once(number, call, make=is_forward) for number, call in enumerate(calls)]
        return calls

    def weighted_loss(self, loss_fn: LossFn, output: Any, given: StageInput, added: AddedLosses) -> Tensor:
        """The loss of `loss_fn` plus the added losses, times the microbatch's weight. Called after the last layer of the last stage."""
        loss = loss_fn(output, given.target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {found}: it must return a 0-dim tensor: a mean over the rows of the "
                'microbatch, or their sum with Pipeline(..., loss_reduction="sum")'
            )
        return (added.added_to(loss) if added.losses or added.of_layer else loss) * given.weight

    def _end_forward(self, late: LateBoundSet, held: Held, leaves: Sequence[Any], *, needed: bool) -> None:
        """Close the set after all layers have run under hooks. `leaves` are those of the input and of the output."""
        # Storages of buffers that a later F may change. Tensors in them that F has saved are copied.
        changing = self.state.live_storages() if late.is_filled or self.kept else frozenset()
        if held.given is None and needed and not late.moves:
            storages, kind = late.storages(), held.kind
            kind.others = tuple(
                n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_key(leaf) in storages
            )
            held.counted = [(leaves[number], self.meter.hold(leaves[number])) for number in kind.others]
            late.end_forward(changing, needed=needed, size=kind.kept_size)
            is_known = kind.kept_size.is_known and held.deferral is None
            kind.is_plain = is_known and not late.reads_from and not storages & changing
        else:
            late.end_forward(changing, needed=needed)
        if self._selection is not None and self._selection.is_watched and held.given is not None:
            for line in self._selection.kept_nothing(self._title):
                warnings.warn(line, stacklevel=3)

    def _hold(self, microbatch: int, held: Held, bytes_before: int) -> None:
        """Hold the microbatch until its B, and note the bytes of its set, its kept outputs and its stashed input."""
        self._held[microbatch] = held
        late = held.late
        if late is None or late.is_filled:
            self.set_bytes[microbatch] = self.meter.own_bytes - bytes_before
            if late is not None and late.outputs is not None:
                self.set_bytes[microbatch] -= late.outputs_bytes - late.saved_outputs_bytes
        if held.given is not None:
            assert late is not None
            self.kept_bytes[microbatch] = 0 if late.outputs is None else late.outputs_bytes
            bytes_before = self.meter.own_bytes
            stashed = list(held.given.leaves)
            for passed in held.passed.values():
                stashed += passed.leaves
            for leaf in stashed:
                if isinstance(leaf, Tensor):
                    held.counted.append((leaf, self.meter.hold(leaf)))
            self.stash_bytes[microbatch] = self.meter.own_bytes - bytes_before

    # Host memory, and R ---------------------------------------------------------------------------------------------

    def host_set(self, microbatch: int, part: int | None = None) -> HostSet | None:
        """The storages of a set that go to host memory, if F had `moves`. None: the stage holds no slots of the microbatch."""
        assert part is None, f"stage {self.index} has no parts"
        held = self._held.get(microbatch)
        if held is None or held.late is None:
            return None
        if held.host_set is None:
            held.host_set = HostSet(held.late, self.meter, self.device, held.lent)
        return held.host_set

    def holds(self, microbatch: int) -> bool:
        """Whether the stage holds something of the microbatch, so that R or B has work."""
        return microbatch in self._held

    def recompute(self, microbatch: int, part: int | None = None) -> None:
        """Run R: fill the slots of F. Raises RecomputeMismatch: R differed from F; SavedTensorChanged: a tensor for R or B was changed."""
        assert part is None, f"stage {self.index} has no parts"
        held = self._held[microbatch]
        late = held.late
        assert held.given is not None, f"stage {self.index} recomputes {microbatch}, whose set it keeps"
        assert late is not None
        if list(map(_VERSION, self.state.parameters)) != self._versions:
            pairs = zip(self.state.parameters, self._versions or ())
            changed = [self.state.name_of_tensor(one) for one, old in pairs if one._version != old]
            raise SavedTensorChanged(
                f"{', '.join(changed[:3])} changed between F and R of one microbatch: change parameters after the step only"
            )
        if not late.end:  # R has no slot to fill or to prove
            late.drop()
            return
        seen = held.seen if held.seen.tensors else None
        again = Recompute(late, self._stop, self._proved, detaches=not self.may_hold_outside <= self.kept)
        try:
            with _AS_IS if seen is None else seen.stand_in():
                self._run_again(held, held.given, again)
        finally:
            if held.has_casts:
                self.casts.end_recompute()
        again.end(frozenset() if seen is None else seen.storages(self.state.normal), held.kind.size)
        if late.proof is None:
            self.set_bytes[microbatch] = late.num_bytes + late.set_bytes_before
        else:
            self._stop = max(late.proof.stop, self._stop) if self._proved else late.proof.stop
            self._proved = again.last_signatures

    def _run_again(self, held: Held, given: StageInput, again: Recompute) -> None:
        value, entered = self._entry.enter(given, None, recomputed=True)
        with AddedLosses(value) as added:
            value = added.value
            try:
                for number, call in enumerate(self._calls(held, given, added, is_forward=False)):
                    hooks = again.start_layer()
                    if hooks is None:
                        if number in held.passed:
                            value = held.passed[number].again(self._anchor)
                        continue
                    self.state.seeders[number](held.seeds[number])
                    added.of_layer = []
                    with hooks:
                        value = call(value)
            except SetComplete:
                return
            except BaseException as error:
                if not again.is_what_was_meant(error):
                    raise
                return
        self._entry.check(entered)

    # B ------------------------------------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, scale: float = 1.0, part: int | None = None
    ) -> list[Tensor | None]:
        """Run B: add to `.grad` of the parameters, and return the gradient of each input leaf (None: it has none).

        `gradients` has one entry per leaf of the output. A stage with a loss ignores it: the gradient of the loss is `scale`. If F had
        `split`, this is I: weight gradients that may wait are left to W. Raises SavedTensorChanged: a saved tensor was changed in place.
        """
        assert part is None, f"stage {self.index} has no parts"
        held = self._held.pop(microbatch)
        if held.loss is not None:
            gradients = (torch.full(held.loss[0], scale, dtype=held.loss[1], device=self.device),)
        roots: list[GradientEdge] = []  # (`list[GradientEdge]()` takes twenty times as long)
        seeds: list[Tensor] = []
        for root, seed in zip(held.roots, gradients):
            if root is not None and seed is not None:
                roots.append(root)
                seeds.append(seed)
        held.roots.clear()
        self._release(held)
        if held.late is not None and held.late.outputs is not None:
            held.late.outputs.drop()  # R has ended, also on a GPU, so their memory may be reused
        deferral = held.deferral
        if deferral is not None:
            self._deferred[microbatch] = deferral
        try:
            if roots:
                # torch.autograd.backward does the same, but first compares shapes in Python: a third of the time of a small stage.
                _engine_run_backward(
                    tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        except RuntimeError as error:
            if held.late is None and (node := changed_node(roots)) is not None:
                layer = self.name_of(bisect_left(held.ends, node._sequence_nr()))
                raise saved_changed(layer, torch.Size(), "before B read it", node.name()) from error
            raise
        if deferral is not None:  # memory holds the set, then the tensors for W: note the larger
            self.set_bytes[microbatch] = max(self.set_bytes.get(microbatch, 0), deferral.num_bytes)
        held.size = None
        if held.late is not None:
            held.late.assert_closed()
        return list(map(held.sink.pop, range(held.num_inputs), (None,) * held.num_inputs))

    def backward_weights(self, microbatch: int) -> None:
        """Run W: compute the weight gradients that wait, and add them to `.grad`. Raises SavedTensorChanged: a tensor for W was changed."""
        self._deferred.pop(microbatch).run()

    def end_step(self) -> None:
        """End a step: assert that each microbatch has had its B (and W), so that no input and no set is held."""
        assert not self._held, f"stage {self.index} still holds microbatches {', '.join(map(str, self._held))}"
        waiting = ", ".join(map(str, self._deferred))
        assert not waiting, f"stage {self.index} has had no W of microbatches {waiting}"
        if self._had_casts or self.casts.storages:  # a layer may have used autocast itself
            self.casts.end_step()
        self._versions, self._had_casts = None, False

    def _release(self, held: Held) -> None:
        """Stop counting `held.counted` in the meter: B frees these tensors."""
        for _, key in held.counted:
            self.meter.release(key)
        held.counted.clear()

    def drop(self) -> None:
        """Drop all microbatches: a step has failed."""
        for held in self._held.values():
            self._release(held)
            held.size = None
            if held.late is not None:
                held.late.drop()
        for deferral in self._deferred.values():
            deferral.drop()
        self._held.clear()
        self._deferred.clear()
        self.end_step()
