"""One stage on one rank: F, R and B, or I and W, of ONE microbatch. Knows nothing of other ranks, of order or of streams."""

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
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.added_losses import AddedLosses
from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.entry import Entry
from pipetrain.stage.errors import (
    SavedTensorChanged,
    Signature,
    changed_node,
    loss_without_gradient,
    refuse_gradient_inside,
    saved_changed,
)
from pipetrain.stage.inspection import FirstLook
from pipetrain.stage.kept import KeptLayers
from pipetrain.stage.layer_state import LayerState
from pipetrain.stage.leaves import LeafWatch, NameOf, no_names
from pipetrain.stage.local import without_local
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import Held, MicrobatchKind, StageInput, StageOutput
from pipetrain.stage.proof import Proof, Stop
from pipetrain.stage.recompute import Recompute, SetComplete
from pipetrain.stage.selective import Selection, Wanted
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral, DeferredWeights
from pipetrain.stage.split_linear import split_layer
from pipetrain.stage.tensor_copies import storage_key
from pipetrain.stage.witness import Witness

LossFn = Callable[[Any, Any], Tensor]
_VERSION = attrgetter("_version")
_Layer = Callable[[Any], Any]


class Stage:
    """Consecutive layers and, on the last stage, the loss. `first_layer` is the global index of the first one.

    `part` is the index of these layers among the parts of a stage (`stage/segments.py`); `beside` are all layers of that stage.
    `selective`: which outputs stay from F to B although R runs. `keep_layers`: global indices of layers that no R runs.
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
        name_of: NameOf = no_names,
        selective: Sequence[Wanted] = (),
        keep_layers: Collection[int] = (),
        part: int | None = None,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        self.index = index
        self.layers = list(layers)
        self.first_layer = first_layer
        self.loss_fn = loss_fn
        self.set_bytes: dict[int, int] = {}  # microbatch -> bytes of its set, as last seen
        self.stash_bytes: dict[int, int] = {}  # microbatch -> bytes of its stashed input, as last seen
        self.kept_bytes: dict[int, int] = {}  # microbatch -> bytes of outputs that are kept for its R, as last seen
        self.device = device
        self.meter = meter
        self.indices = range(first_layer, first_layer + len(self.layers) + (loss_fn is not None))
        own = {number - first_layer for number in keep_layers} & set(range(len(self.layers)))
        self.kept = KeptLayers(own, self.name_of)
        self.holds_outside: set[int] = set()  # layers of which the user was told that they do
        self.state = LayerState(self.layers, loss_fn, self.name_of, device)
        self.casts = WeightCasts(self.layers, device, meter)
        self._title = f"stage {index}" if part is None else f"part {part} of stage {index}"
        self._cut_before = (self._title, "stage", "choose a balance that puts both on one stage")
        if part is not None:
            self._cut_before = (self._title, "part", "use fewer recompute.segments")
        self._held: dict[int, Held] = {}
        self._deferred: dict[int, Deferral] = {}  # from I to W
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._entry = Entry(
            self._anchor, self._title, self.name_of, len(self.indices) - 1, has_loss=loss_fn is not None
        )
        self._stop = Stop.AT_LAYER  # where R may end; before a proof
        self._proved: Sequence[Signature] = ()  # with these in the last layer of which R fills slots
        self._detaches = True  # what R saves, from R's graph; until it is known that the graph holds nothing else
        self._signatures: dict[Signature, Signature] = {}  # of this step
        self._kinds: dict[Hashable, MicrobatchKind] = {}
        self._versions: list[int] = []  # of the parameters, in this step
        self._selection = Selection(selective, self.layers, first_layer) if selective else None
        self._leaves = LeafWatch(
            self.layers, loss_fn, first_layer=first_layer, anchor=self._anchor, name_of=name_of, beside=beside
        )

    @functools.cached_property
    def weights(self) -> DeferredWeights:
        return DeferredWeights(self.layers, self.name_of, self.meter, self.casts)

    def layers_by_number(self) -> dict[int, nn.Module]:
        """The layers by their global index."""
        return {self.first_layer + number: layer for number, layer in enumerate(self.layers)}

    @property
    def end(self) -> str:
        """The name, for errors, of the layer (or loss) whose output is the stage's output."""
        return f"{self.name_of(len(self.layers) - 1)}, the last of {self._title},"

    def name_of(self, number: int) -> str:
        """A layer by its index in the stage, or the loss, in an error."""
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
    ) -> StageOutput:
        """F with a graph. With a loss, the output is the weighted loss.

        With `prove`, the set is kept although R will run, and R is compared with it, so that layers that R cannot repeat are
        found. `has_backward`: whether B will be called; B does nothing if the output needs no gradient.
        `split`: as I and W. `witness`: checksums of what F and R save are compared.

        Raises:
            SavedTensorChanged, LayerRefused, ValueError (a loss that is no scalar or needs no gradient, a leaf of another stage), or
            what a layer raises.
        """
        assert microbatch not in self._held, f"stage {self.index} runs F{microbatch} twice"
        bytes_before = self.meter.current_bytes
        if not self.state.is_looked_at:
            self.state.look()
        if not self._versions:
            self._versions = list(map(_VERSION, self.state.parameters))
        has_casts = self.casts.is_active()
        kind = self._kind_of(given, split=split, has_casts=has_casts)
        is_new = prove or not kind.has_run
        held = Held(
            None if keep else given,
            len(given.leaves),
            bool(given.wants_gradient),
            kind,
            given.seeds_of(self.indices),
            has_casts=has_casts,
        )
        is_plain = keep and not prove and kind.is_plain
        if not is_plain:
            self._open_set(held, prove=prove, is_new=is_new, split=split, witness=witness)
        with self._leaves.over(given.on_layer) if is_new else nullcontext(given.on_layer) as on_layer:
            outputs = self._run_forward(held, given, on_layer, prove=prove, is_new=is_new)
        output = self._detached(held, outputs)
        needed = any(output.wants_gradient)
        if self.loss_fn is not None and has_backward and not needed:
            raise loss_without_gradient()
        if held.deferral is not None:
            self.weights.end_forward(held.deferral, held.roots)
        if held.late is not None:
            self._end_forward(held.late, held, (*given.leaves, *output.leaves), needed=needed)
        else:
            outer = (*given.leaves, *output.leaves)  # in the meter they count as others of their kind did
            held.counted = [(outer[number], self.meter.hold(outer[number])) for number in kind.others]
            held.size = kind.kept_size.counted(self.meter, ())
        kind.has_run = True
        if has_backward or needed:
            self._hold(microbatch, held, bytes_before)
        return output

    def _kind_of(self, given: StageInput, *, split: bool, has_casts: bool) -> MicrobatchKind:
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in given.leaves]
        key = (self.state.sight, split, given.wants_gradient, given.is_shared, has_casts, *shapes)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = MicrobatchKind()
        return kind

    def _open_set(self, held: Held, *, prove: bool, is_new: bool, split: bool, witness: bool) -> None:
        keep = held.given is None
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
            known=self._signatures,
        )
        if self.kept.layers:
            late.keep_whole(self.kept.free if keep else self.kept.layers, self.kept.free)
        held.deferral = self.weights.begin(late.refuse_hooks) if split else None

    def _may_witness(self) -> bool:
        """Not on a GPU, where bits may differ and a checksum waits; nor where a layer changes what an earlier one has saved."""
        return self.device.type == "cpu" and self._stop is not Stop.AT_END

    def _run_forward(
        self, held: Held, given: StageInput, on_layer: Callable[[int, Any], None] | None, *, prove: bool, is_new: bool
    ) -> Any:
        """All layers, and the loss."""
        late, recomputed = held.late, held.given is not None
        before, look = None, None
        if late is not None:
            if prove:
                self.state.relearn()
            before = self.state.before_forward(recomputed=recomputed)
            if is_new or before.learning:
                look = FirstLook(self, given, held.seeds, late, held.deferral, compares=prove and recomputed)
        clone = recomputed and before is not None and before.learning
        value, entered = self._entry.enter(given, held.sink, recomputed=recomputed, clone=clone)
        with AddedLosses() as added:
            value = added.take(value)
            for number, call in enumerate(self._calls(held, given, added, is_forward=True)):
                added.of_layer = []
                value = self._forward_layer(held, look, number, call, value)
                added.losses += added.of_layer
                if on_layer is not None:
                    is_loss = number == len(self.layers)
                    on_layer(self.first_layer + number, value if is_loss else added.beside(value))
            if self.loss_fn is None:
                value = added.beside(value)
        self._entry.check(entered)
        if before is not None:
            self.kept.check(held.passed, look=look is not None)
            held.seen = self.state.after_forward(before, recomputed=recomputed)
        return without_local(value)

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

    def _forward_layer(self, held: Held, look: FirstLook | None, number: int, call: _Layer, value: Any) -> Any:
        late = held.late
        if look is not None:
            look.before(number, value)
        self.state.seeders[number](held.seeds[number])
        if late is None:
            output = call(value)
            node = output.grad_fn if isinstance(output, Tensor) else None
            held.ends.append(node._sequence_nr() if node is not None else held.ends[-1] if held.ends else -1)
            return output
        try:
            with late.start_layer(value):
                output = call(value)
        except BaseException as error:
            refuse_gradient_inside(
                late, self.name_of, number, error, self._cut_before if held.has_input_gradient else None
            )
            raise
        if late.wanted is not None or late.hooks_refused:
            refuse_gradient_inside(late, self.name_of, number)
        if look is not None:
            look.after(number)
        # A gradient may go from a kept layer into the one before it, which must then get what that has given.
        if late.whole and held.given is not None and number in late.whole and number + 1 not in late.whole:
            output = self.kept.pass_on(held.passed, number, output, look=look is not None)
        return output

    def weighted_loss(self, loss_fn: LossFn, output: Any, given: StageInput, added: AddedLosses) -> Tensor:
        """What the last layer of the last stage is followed by."""
        loss = loss_fn(output, given.target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {found}: it must return a 0-dim tensor: a mean over the rows of the "
                'microbatch, or their sum with Pipeline(..., loss_reduction="sum")'
            )
        return added.added_to(loss) * given.weight

    def _detached(self, held: Held, outputs: Any) -> StageOutput:
        """What leaves the stage; the graph of F is held by its edges, so that the memory of an output is free once it is sent."""
        leaves, spec = pytree.tree_flatten(outputs)
        results, wants, detached = list[Any](), list[bool](), dict[int, Tensor]()
        for leaf in leaves:
            is_tensor = isinstance(leaf, Tensor)
            if is_tensor and id(leaf) not in detached:
                detached[id(leaf)] = leaf.detach()
            results.append(detached[id(leaf)] if is_tensor else leaf)
            wants.append(is_tensor and leaf.requires_grad)
            held.roots.append(get_gradient_edge(leaf) if wants[-1] else None)
        if self.loss_fn is not None:
            held.loss = leaves[0].shape, leaves[0].dtype
        return StageOutput(tuple(results), spec, tuple(wants))

    def _end_forward(self, late: LateBoundSet, held: Held, leaves: Sequence[Any], *, needed: bool) -> None:
        """All layers have run under hooks; `leaves` are those of the input and of the output."""
        # A later F may go on changing what a filled set has of these.
        changing = self.state.live_storages() if late.is_filled or self.kept.layers else frozenset()
        if held.given is None and needed:
            storages, kind = late.storages(), held.kind
            others = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_key(leaf) in storages]
            held.counted = [(leaves[number], self.meter.hold(leaves[number])) for number in others]
            late.end_forward(changing, needed=needed, size=kind.kept_size)
            kind.others = tuple(others)
            is_known = kind.kept_size.is_known and held.deferral is None
            kind.is_plain = is_known and not late.reads_from and not storages & changing
        else:
            late.end_forward(changing, needed=needed)
        if self._selection is not None and self._selection.is_watched and held.given is not None:
            for line in self._selection.kept_nothing(self._title):
                warnings.warn(line, stacklevel=3)

    def _hold(self, microbatch: int, held: Held, bytes_before: int) -> None:
        self._held[microbatch] = held
        late = held.late
        if late is None or late.is_filled:
            unsaved = 0 if late is None else late.outputs_bytes - late.saved_outputs_bytes
            self.set_bytes[microbatch] = self.meter.current_bytes - bytes_before - unsaved
        if held.given is not None:
            assert late is not None
            self.kept_bytes[microbatch] = late.outputs_bytes
            bytes_before = self.meter.current_bytes
            stashed = list(held.given.leaves)
            for passed in held.passed.values():
                stashed += passed.leaves
            for leaf in stashed:
                if isinstance(leaf, Tensor):
                    held.counted.append((leaf, self.meter.hold(leaf)))
            self.stash_bytes[microbatch] = self.meter.current_bytes - bytes_before

    # R ------------------------------------------------------------------------------------------------------------

    def holds(self, microbatch: int) -> bool:
        """Whether R or B has work to do."""
        return microbatch in self._held

    def recompute(self, microbatch: int, part: int | None = None) -> None:
        """R: the stage's forward again, until the last slot is full. Its graph is thrown away.

        Raises:
            RecomputeMismatch: R did not do what F did.
            SavedTensorChanged: a parameter or the stashed input changed since F.
        """
        assert part is None, f"stage {self.index} has no parts"
        held = self._held[microbatch]
        late = held.late
        assert held.given is not None, f"stage {self.index} recomputes {microbatch}, whose set it keeps"
        assert late is not None
        self._check_parameters()
        if not late.needs_recompute:
            late.drop()
            return
        # An operation may fill what it has saved later: R ends within a layer only where that is proved of one that saves the same.
        is_proved = self._stop is not Stop.AT_SLOT or late.last_signatures() == self._proved
        again = Recompute(late, self._stop if is_proved else Stop.AT_LAYER, detaches=self._detaches)
        try:
            with self.state.as_seen(held.seen) if held.seen.buffers.tensors else nullcontext():
                self._run_again(held, held.given, again)
        finally:
            if held.has_casts:
                self.casts.end_recompute()
        again.end(held.seen.storages(), held.kind.size)
        if late.proof is None:
            self.set_bytes[microbatch] = late.num_bytes + late.set_bytes_before
        else:
            self._stop = max(late.proof.stop, self._stop) if self._proved else late.proof.stop
            self._proved = late.last_signatures()
            self._detaches = bool(self.holds_outside)

    def _run_again(self, held: Held, given: StageInput, again: Recompute) -> None:
        value, entered = self._entry.enter(given, held.sink, recomputed=True)
        with AddedLosses() as added:
            value = added.take(value)
            try:
                for number, call in enumerate(self._calls(held, given, added, is_forward=False)):
                    hooks = again.start_layer()
                    if hooks is None:
                        if number in held.passed:
                            value = self.kept.pass_again(held.passed[number], number, self._anchor)
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

    def _check_parameters(self) -> None:
        if list(map(_VERSION, self.state.parameters)) == self._versions:
            return
        pairs = zip(self.state.parameters, self._versions)
        changed = [self.state.name_of_tensor(one) for one, old in pairs if one._version != old]
        raise SavedTensorChanged(
            f"{', '.join(changed[:3])} changed between F and R of one microbatch: change parameters after the step only"
        )

    # B ------------------------------------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, scale: float = 1.0, part: int | None = None
    ) -> list[Tensor | None]:
        """B: adds to `.grad` of the parameters; returns the gradient of each input leaf (None: it has none).

        `gradients` belong to the output leaves in order. With a loss they are ignored and the root is `scale`.
        If F had `split`, this is I: the weight gradients that may wait do so until `backward_weights`.
        """
        assert part is None, f"stage {self.index} has no parts"
        held = self._held.pop(microbatch)
        if held.loss is not None:
            gradients = (torch.full(held.loss[0], scale, dtype=held.loss[1], device=self.device),)
        roots, seeds = list[GradientEdge](), list[Tensor]()
        for root, seed in zip(held.roots, gradients):
            if root is not None and seed is not None:
                roots.append(root)
                seeds.append(seed)
        held.roots.clear()
        self._release(held)
        if held.late is not None:
            held.late.start_backward()
        deferral = held.deferral
        if deferral is not None:
            self._deferred[microbatch] = deferral
        if roots:
            self._run_backward(held, roots, seeds)
        if deferral is not None:  # its place must have room for either
            self.set_bytes[microbatch] = max(self.set_bytes.get(microbatch, 0), deferral.num_bytes)
        held.size = None
        if held.late is not None:
            held.late.assert_closed()
        return list(map(held.sink.pop, range(held.num_inputs), (None,) * held.num_inputs))

    def _run_backward(self, held: Held, roots: list[GradientEdge], seeds: list[Tensor]) -> None:
        try:
            torch.autograd.backward(roots, seeds)
        except RuntimeError as error:
            node = changed_node(roots) if held.late is None else None
            if node is None:
                raise
            layer = self.name_of(bisect_left(held.ends, node._sequence_nr()))
            raise saved_changed(layer, torch.Size(), "before B read it", node.name()) from error

    def backward_weights(self, microbatch: int) -> None:
        """W: adds the gradients that I has deferred to `.grad` of the weights. Raises SavedTensorChanged: what waited was changed."""
        self._deferred.pop(microbatch).run()

    def end_step(self) -> None:
        """All ops of a step have run: each input and each set that F or R brought has had its B."""
        assert not self._held, f"stage {self.index} still holds microbatches {', '.join(map(str, self._held))}"
        waiting = ", ".join(map(str, self._deferred))
        assert not waiting, f"stage {self.index} has had no W of microbatches {waiting}"
        self._end_step()

    def _end_step(self) -> None:
        self.casts.end_step()
        self.state.end_step()
        self._versions.clear()
        self._signatures.clear()

    def _release(self, held: Held) -> None:
        """Stop counting the input, and what a kept set shares with it or with the output: B frees both."""
        for _, key in held.counted:
            self.meter.release(key)
        held.counted.clear()

    def drop(self) -> None:
        """Drop everything that is held, because a step has failed."""
        for held in self._held.values():
            self._release(held)
            held.size = None
            if held.late is not None:
                held.late.drop()
        for deferral in self._deferred.values():
            deferral.drop()
        self._held.clear()
        self._deferred.clear()
        self._end_step()
