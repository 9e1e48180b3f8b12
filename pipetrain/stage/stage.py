"""One stage on one rank: F, R and B, or I and W, of ONE microbatch. Knows nothing of other ranks, of order or of streams."""

from __future__ import annotations

import functools
import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.added_losses import AddedLosses
from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.deferred import DeferredWeights
from pipetrain.stage.entered import Entered, Gate, entered_targets
from pipetrain.stage.inspection import LayerInspection, refuses_hooks
from pipetrain.stage.layer_state import NOTHING_SEEN, LayerState, Seen
from pipetrain.stage.leaves import LeafWatch, NameOf, no_names
from pipetrain.stage.local import without_local
from pipetrain.stage.meter import ActivationMeter, CountedBytes, SetSize
from pipetrain.stage.past import Past, prepare_cached, run_cached
from pipetrain.stage.probe import HeldOutsideProbe
from pipetrain.stage.proof import Proof, Stop
from pipetrain.stage.seeding import seed_generators
from pipetrain.stage.selective import Selection, Wanted
from pipetrain.stage.slots import LateBoundSet, LayerRefused, SavedTensorChanged, SetComplete, Slot, changed_node
from pipetrain.stage.split_function import Deferral
from pipetrain.stage.tensor_copies import storage_key
from pipetrain.stage.witness import Witness

LossFn = Callable[[Any, Any], Tensor]
_Layer = Callable[[Any], Any]

# What torch.autograd.grad says of a tensor from which nothing leads to its outputs.
_NOT_IN_THE_GRAPH = "appears to not have been used in the graph"


@dataclass(frozen=True)
class StageInput:
    """What F gets: the leaves of a tree, which of them want a gradient, and the seed of each layer for this microbatch.

    The same tensor may stand in several leaves: what changes one in place changes all. `is_shared`: another stage of this rank
    reads the same memory, so that a change in place must not reach it. `fixed` are leaves that may not be changed in place at
    all: what they are, and why; `fixed_target` are those of the target.
    `target` and `weight` are for the stage that computes the loss.
    `on_layer` is given the number and the output of each layer in F, `WithLosses` where some were added; the loss has the number after
    the last layer's.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: frozenset[int]
    seed_of: Callable[[int], int]
    target: Any = None
    weight: float = 1.0
    on_layer: Callable[[int, Any], None] | None = None
    is_shared: bool = False
    fixed: Mapping[int, str] = field(default_factory=dict)
    fixed_target: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOutput:
    """What F gives, detached: the leaves of the output tree and which of them want a gradient. The same tensor in two leaves
    is so in the layers' output, too."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: tuple[bool, ...]


@dataclass
class _Passed:
    """What a layer that is kept gave the next one, which R begins with: the leaves of a tree, and which of them need a gradient. `given`,
    until F has ended: each tensor as the next layer got it, and its version."""

    leaves: list[Any]
    wants_gradient: list[bool]
    spec: pytree.TreeSpec
    given: list[tuple[Tensor, int]]


@dataclass
class _Held:
    """What a stage holds of a microbatch between its F and its B."""

    given: StageInput | None  # None for a kept set without R: nothing will run again
    late: LateBoundSet | None  # None for a kept set that autograd holds by itself
    num_inputs: int
    deferral: Deferral | None = None  # None: B will run, and not I and W
    seen: Seen = NOTHING_SEEN  # the state that F saw
    roots: list[GradientEdge | None] = field(default_factory=list)  # an edge per output leaf that has a gradient
    kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)  # of the output leaves with a root
    sink: dict[int, Tensor] = field(default_factory=dict)  # input leaf -> its gradient
    counted: list[tuple[Tensor, int]] = field(
        default_factory=list
    )  # the stashed input, and what of a kept set others hold, too
    kind: Hashable = None
    passed: dict[int, _Passed] = field(default_factory=dict)  # by layer
    size: CountedBytes | None = None  # of a kept set that autograd holds
    ends: list[int] = field(default_factory=lambda: [-1])  # of its layers, as autograd counts nodes; before the first


@dataclass(frozen=True)
class _Known:
    """Of all microbatches of one kind (shapes, modes, what needs a gradient), once one has run.

    `others` are leaves, of the input and behind them of the output, that its set has, too. `is_plain`: nothing that a later F changes is
    in it, so that autograd may hold it by itself.
    """

    others: tuple[int, ...] = ()
    is_plain: bool = False


@dataclass(frozen=True)
class PartOf:
    """Which part of a stage some of its layers are, from 0, and all layers of that stage."""

    number: int
    layers: Sequence[nn.Module]


class Stage:
    """Consecutive layers and, on the last stage, the loss. `first_layer` is the global index of the first one.

    `part`: the layers are one of the parts in which a stage is recomputed (`stage/segments.py`), a stage in the stage.
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
        part: PartOf | None = None,
    ) -> None:
        self.index = index
        self.layers = list(layers)
        self.first_layer = first_layer
        self.loss_fn = loss_fn
        self.set_bytes: dict[int, int] = {}  # microbatch -> bytes of its set, as last seen
        self.stash_bytes: dict[int, int] = {}  # microbatch -> bytes of its stashed input, as last seen
        self.kept_bytes: dict[int, int] = {}  # microbatch -> bytes of outputs that are kept for its R, as last seen
        self._title = f"stage {index}" if part is None else f"part {part.number} of stage {index}"
        self._cut_before = ("stage", "choose a balance that puts both on one stage")
        if part is not None:
            self._cut_before = ("part", "use fewer recompute.segments")
        self._device = device
        self._meter = meter
        self._held: dict[int, _Held] = {}
        self._deferred: dict[int, Deferral] = {}  # from I to W
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        own = range(first_layer, first_layer + len(self.layers))
        self._kept = {
            number - first_layer for number in keep_layers if number in own
        }  # layers whose saved tensors stay from F to B, and are not recomputed
        self._free: set[int] = set()  # of these, those that run without hooks: they take gradients inside
        self._told: set[int] = set()  # of these, whom the user was told of
        self._changed_in_place: set[int] = set()  # of these, those whose output the next layer changes
        self._stop: Stop | None = None  # where R may end; None: no microbatch was proved
        self._known: dict[Hashable, _Known] = {}  # by kind, of kept sets
        self._sizes: dict[Hashable, SetSize] = {}  # by kind, and whether it is kept
        self._versions: list[int] = []  # of the parameters, in this step
        self._clones_inputs = False
        self._kinds: set[Hashable] = set()  # of microbatches that have run
        self._has_entered = False  # whether it is known what the layers change of what they are given
        self._state = LayerState(self.layers, loss_fn, self._name_of, device)
        self._casts = WeightCasts(self.layers, device, meter)
        self._selection = Selection.of(selective, self.layers, first_layer)
        self._probe = HeldOutsideProbe(self._name_of, meter)
        self._probe.done = part is not None  # it looks at all that the process holds: once for all parts
        self._leaves = LeafWatch(
            self.layers,
            loss_fn,
            first_layer=first_layer,
            anchor=self._anchor,
            name_of=name_of,
            beside=() if part is None else part.layers,
        )

    def layers_by_number(self) -> dict[int, nn.Module]:
        """The layers by their global index."""
        return {self.first_layer + number: layer for number, layer in enumerate(self.layers)}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def end(self) -> str:
        """Who gives what leaves the stage, in an error."""
        return f"{self._name_of(len(self.layers) - 1)}, the last of {self._title},"

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

        With `prove`, what could make a difference later is looked for now: the set is kept although R will run, and R is
        compared with it. `has_backward`: whether B will be asked for; where the output needs no gradient it does nothing.
        `split`: as I and W. `witness`: checksums of what F and R save are compared.

        Raises:
            SavedTensorChanged, LayerRefused, ValueError (a loss that is no scalar or needs no gradient, a leaf of another stage), or
            what a layer raises.
        """
        assert microbatch not in self._held, f"stage {self.index} runs F{microbatch} twice"
        before = self._meter.current_bytes
        self._start_step()
        kind = self._kind_of(given, split=split)
        known = self._known.get(kind) if keep and not prove else None
        if known is not None and known.is_plain:
            held, outputs = self._forward_plain(given)
        else:
            look = prove or kind not in self._kinds
            with self._leaves.over(given.on_layer) if look else nullcontext(given.on_layer) as on_layer:
                watched = given if on_layer is given.on_layer else replace(given, on_layer=on_layer)
                held, outputs = self._forward(watched, keep=keep, prove=prove, split=split, look=look, witness=witness)
        leaves, spec = pytree.tree_flatten(outputs)
        wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if self.loss_fn is not None and has_backward and not any(wants):
            raise ValueError(_LOSS_WITHOUT_GRADIENT)
        held.kind = kind
        held.roots = [get_gradient_edge(leaf) if wanted else None for leaf, wanted in zip(leaves, wants)]
        held.kinds = [(leaf.shape, leaf.dtype) for leaf, wanted in zip(leaves, wants) if wanted]
        if held.deferral is not None:
            self._weights.end_forward(held.deferral, held.roots)
        detached = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)}
        results = tuple(detached.get(id(leaf), leaf) for leaf in leaves)
        if held.late is not None:
            self._end_forward(held.late, held, (*given.leaves, *results), keep=keep, needed=any(wants))
        elif known is not None:
            self._count(held, known, (*given.leaves, *results))
        self._kinds.add(kind)
        if has_backward or any(wants):
            self._hold(microbatch, held, before)
        return StageOutput(results, spec, wants)

    def _start_step(self) -> None:
        """What may be another than in the step before, and stays in this one."""
        self._state.look()
        if not self._versions:
            self._versions = self._parameter_versions()

    def _kind_of(self, given: StageInput, *, split: bool) -> Hashable:
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in given.leaves]
        return (
            self._state.sight,
            split,
            given.wants_gradient,
            given.is_shared,
            torch.is_autocast_enabled(self._device.type),
            *shapes,
        )

    def _forward_plain(self, given: StageInput) -> tuple[_Held, Any]:
        """F of a set that stays until B, which autograd holds by itself: no hooks, and no slots."""
        held = _Held(None, None, len(given.leaves))

        def run_layer(number: int, call: _Layer, value: Any) -> Any:
            if casts:
                call = self._casts.once(number, call, make=True)
            self._seed(number, given)
            output = call(value)
            node = output.grad_fn if isinstance(output, Tensor) else None
            held.ends.append(held.ends[-1] if node is None else node._sequence_nr())
            return output

        casts = self._casts.is_active()
        return held, self._run(given, held, run_layer, clone=False, on_layer=given.on_layer)

    def _count(self, held: _Held, known: _Known, leaves: Sequence[Any]) -> None:
        """A set like those of its kind: in the meter it counts as they did."""
        held.counted = [(leaves[number], self._meter.hold(leaves[number])) for number in known.others]
        held.size = self._sizes[held.kind, True].counted(self._meter, ())

    def _end_forward(self, late: LateBoundSet, held: _Held, leaves: Sequence[Any], *, keep: bool, needed: bool) -> None:
        """All layers have run under hooks; `leaves` are those of the input and of the output."""
        others: tuple[int, ...] = ()
        changing = self._state.live_storages() if late.is_filled or self._kept else frozenset()
        if keep and needed:
            storages = late.storages()
            others = tuple(
                n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_key(leaf) in storages
            )
            held.counted = [(leaves[number], self._meter.hold(leaves[number])) for number in others]
        # A later F may go on changing what a filled set has of these.
        size = self._sizes.setdefault((held.kind, True), SetSize()) if keep and needed else None
        late.end_forward(changing, needed=needed, size=size)
        if size is not None:
            is_plain = size.is_known and held.deferral is None and not late.reads_from and not storages & changing
            self._known[held.kind] = _Known(others, is_plain)
        if self._selection is not None and self._selection.is_watched and not keep:
            for line in self._selection.kept_nothing(self._title):
                warnings.warn(line, stacklevel=3)

    def _hold(self, microbatch: int, held: _Held, bytes_before: int) -> None:
        self._held[microbatch] = held
        late = held.late
        if late is None or late.is_filled:
            unsaved = 0 if late is None else late.outputs_bytes - late.saved_outputs_bytes
            self.set_bytes[microbatch] = self._meter.current_bytes - bytes_before - unsaved
        if held.given is not None:
            assert late is not None
            self.kept_bytes[microbatch] = late.outputs_bytes
            bytes_before = self._meter.current_bytes
            passed = [leaf for one in held.passed.values() for leaf in one.leaves]
            stashed = (leaf for leaf in (*held.given.leaves, *passed) if isinstance(leaf, Tensor))
            held.counted = [(leaf, self._meter.hold(leaf)) for leaf in stashed]
            self.stash_bytes[microbatch] = self._meter.current_bytes - bytes_before

    def _forward(
        self, given: StageInput, *, keep: bool, prove: bool, split: bool, look: bool, witness: bool
    ) -> tuple[_Held, Any]:
        held = self._start(given, keep=keep, prove=prove, split=split, look=look, witness=witness)
        assert held.late is not None
        if prove:
            self._state.relearn()
        before = self._state.before_forward(recomputed=not keep)
        probe = None if keep or self._probe.done else self._probe
        if probe:
            probe.start()
        look = look or before.learning
        run_layer = functools.partial(self._forward_layer, held, given, look=look, compares=prove and not keep)
        outputs = self._run(
            given,
            held,
            run_layer,
            clone=not keep and (self._clones_inputs or before.learning),
            probe=probe,
            on_layer=given.on_layer,
        )
        self._check_passed(held, look=look)
        held.seen = self._state.after_forward(before, recomputed=not keep)
        if probe:
            probe.end(outputs, (*given.leaves, *held.late.tensors()))
        return held, outputs

    def _start(self, given: StageInput, *, keep: bool, prove: bool, split: bool, look: bool, witness: bool) -> _Held:
        proof = Proof() if prove and not keep else None
        late = LateBoundSet(
            self._name_of,
            self._meter,
            keep=keep,
            proof=proof,
            casts=self._casts_in_force(),
            selection=self._selection,
            watches=look,
            # Where a later layer changes what one has saved, the checksum at that layer's end says nothing.
            witness=Witness() if witness and not keep and not prove and self._stop is not Stop.AT_END else None,
            split=split,
        )
        late.keep_whole(self._free if keep else self._kept, self._free)
        deferral = self._weights.begin(late.refuse_hooks) if split else None
        return _Held(None if keep else given, late, len(given.leaves), deferral)

    @functools.cached_property
    def _weights(self) -> DeferredWeights:
        return DeferredWeights(self.layers, self._name_of, self._meter, self._casts)

    def _casts_in_force(self) -> WeightCasts | None:
        return self._casts if self._casts.is_active() else None

    def _run(
        self,
        given: StageInput,
        held: _Held,
        run_layer: Callable[[int, _Layer, Any], Any],
        *,
        clone: bool,
        probe: HeldOutsideProbe | None = None,
        on_layer: Callable[[int, Any], None] | None = None,
        is_forward: bool = True,
    ) -> Any:
        """All layers, and the loss."""
        clone = clone or (given.is_shared and (self._clones_inputs or not self._has_entered))
        value, entered = self._enter(given, held.sink, clone=clone, is_late=held.given is not None)
        added = AddedLosses()
        value = added.take(value)
        layers: Sequence[_Layer] = self.layers
        if held.deferral is not None:
            layers = self._weights.layers_for(held.deferral, is_forward=is_forward)
        for number, layer in enumerate(layers):
            value = run_layer(number, added.of(layer), value)
            if probe:
                probe.after_layer(number)
            if on_layer:
                on_layer(self.first_layer + number, added.beside(value))
        if self.loss_fn is None:
            value = added.beside(value)
        else:
            loss_fn = added.of(self.loss_fn)
            value = run_layer(len(self.layers), lambda output: self._loss(loss_fn, output, given, added), value)
            if on_layer:
                on_layer(self.first_layer + len(self.layers), value)
        self._check_entered(entered, is_read_again=held.given is not None or given.is_shared, cloned=clone)
        return without_local(value)

    def _check_entered(self, entered: Sequence[Entered], *, is_read_again: bool, cloned: bool) -> None:
        """The layers have run: they may have changed only what nobody else reads."""
        self._has_entered = True
        changed = [one for one in entered if (is_read_again or one.fixed) and one.has_changed()]
        if not changed:
            return
        for one in changed:
            if one.fixed:
                last = self._name_of(len(self.layers) - (self.loss_fn is None))
                raise SavedTensorChanged(
                    f"{self._title}, from {self._name_of(0)} to {last}, changes in place: {one.fixed}. Use the operation "
                    "that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
                )
        self._input_changed(cloned=cloned)

    def _input_changed(self, *, cloned: bool) -> None:
        """The layers changed their input in place: from now on they get a clone, so that the stash stays whole."""
        if not cloned:
            raise SavedTensorChanged(
                f"{self._name_of(0)} changes the input of {self._title} in place, which it did not on its first "
                "microbatch, so that R would see another input: use the operation that returns a new tensor"
            )
        self._clones_inputs = True

    def _seed(self, number: int, given: StageInput) -> None:
        seed = given.seed_of(self.first_layer + number)
        seed_generators(seed, self._device, python=self._state.draws_in_python[number])

    # One layer in F -----------------------------------------------------------------------------------------------

    def _forward_layer(
        self, held: _Held, given: StageInput, number: int, call: _Layer, value: Any, *, look: bool, compares: bool
    ) -> Any:
        """`look`: whether the layer may be recomputed at all is not known yet; `compares`: it will be, and has to do the same then."""
        late = held.late
        assert late is not None
        late.start_layer()
        if self._casts.is_active():
            call = self._casts.once(number, call, make=True)
        gradients = self._gradients() if look else []
        inspection = self._inspect(held, given, number, value) if look and number not in self._free else None
        self._seed(number, given)
        try:
            output = self._call(late, number, call, value)
        except RuntimeError as error:
            if given.wants_gradient and _NOT_IN_THE_GRAPH in str(error):
                kind, instead = self._cut_before
                raise LayerRefused(
                    f"{self._name_of(number)} takes a gradient inside its forward of what is not in the graph of {self._title}: "
                    f"where it goes through a layer of the {kind} before, {instead}"
                ) from error
            raise
        if look:
            self._refuse_backward_inside(number, gradients)
        if inspection is not None and compares and not late.is_whole(number):
            why = inspection.why_kept(late.saved_by(number))
            if why is not None:
                self._keep(late, (number,), f"{self._name_of(number)} {why}", num_bytes=late.bytes_of(number))
        if number in late.reads_from:
            self._learn_who_reads(late, number)
        # A gradient may go from a kept layer into the one before it, which must then get what that has given.
        if held.given is not None and late.is_whole(number) and not late.is_whole(number + 1):
            output = self._pass(held, number, output, look=look)
        return output

    def _inspect(self, held: _Held, given: StageInput, number: int, value: Any) -> LayerInspection:
        """Ahead of F: where the layer must run without hooks, it will."""
        is_loss = number == len(self.layers)
        late, deferral = held.late, held.deferral
        assert late is not None

        def call(layer: Any, value: Any) -> Any:
            if deferral is not None:
                layer = self._weights.split(deferral, number, layer, is_forward=False)
            return self._casts.once(number, layer, make=True)(value) if self._casts.is_active() else layer(value)

        # Of a set that is kept a forward may change weights that do not learn, and a copy must not.
        shared = [parameter for parameter in self._state.parameters if parameter.requires_grad or not late.keep]
        inspection = LayerInspection(
            self.loss_fn if is_loss else self.layers[number],
            value,
            call=self._loss_alone(given) if is_loss else call,
            seed=functools.partial(self._seed, number, given),
            buffers=self._state.copies_of(number),
            shared=shared,
        )
        gradients = self._gradients()
        why = inspection.why_kept_ahead()
        self._refuse_backward_inside(number, gradients)
        if why is not None:
            self._keep(late, (number,), f"{self._name_of(number)} {why}", free=True)
        return inspection

    def _loss_alone(self, given: StageInput) -> Callable[[Any, Any], Any]:
        target = pytree.tree_map_only(Tensor, Tensor.clone, given.target)

        def call(loss_fn: Any, output: Any) -> Any:  # on a target of its own: it may be changed in place
            own = replace(given, target=pytree.tree_map_only(Tensor, Tensor.clone, target))
            return self._loss(loss_fn, output, own, AddedLosses())

        return call

    def _call(self, late: LateBoundSet, number: int, call: _Layer, value: Any) -> Any:
        late.before_layer(_tensors_in(value))
        if late.is_free(number):  # what the layer saves stays in its graph
            try:
                return call(value)
            finally:
                if late.wanted is not None:
                    self._refuse_gradient_through(late.wanted, number)
        try:
            with late.hooks():
                output = call(value)
        except BaseException as error:
            self._refuse_gradient_inside(late, number, error)
            raise
        self._refuse_gradient_inside(late, number, None)
        return output

    def _keep(
        self, late: LateBoundSet, layers: Sequence[int], why: str, *, free: bool = False, num_bytes: int = 0
    ) -> None:
        """From now on these layers are not recomputed; `free`: they run without hooks."""
        last = max(layers)
        self._kept.update(layers)
        if free:
            self._free.update(layers)
        late.keep_whole(set(layers), set(layers) if free else set())
        if late.keep or last in self._told:
            return
        self._told.add(last)
        size = f" ({num_bytes} bytes per microbatch)" if num_bytes else ""
        whose = f"its saved tensors{size}" if min(layers) == last else "the saved tensors of both, and between them,"
        warnings.warn(f"{why}: {whose} are kept from F to B and not recomputed", stacklevel=3)

    def _pass(self, held: _Held, number: int, output: Any, *, look: bool) -> Any:
        """Hold on to what a kept layer gives the next one, which gets a copy where it may change that in place."""
        leaves, spec = pytree.tree_flatten(output)
        own = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        wants = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        if look or number in self._changed_in_place:
            copies = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)}
            leaves = [copies.get(id(leaf), leaf) for leaf in leaves]
        given = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        held.passed[number] = _Passed(own, wants, spec, given)
        return pytree.tree_unflatten(leaves, spec)

    def _check_passed(self, held: _Held, *, look: bool) -> None:
        """F has ended: which layers have changed in place what a kept layer gave them?"""
        for number, passed in held.passed.items():
            changed = any(tensor._version != version for tensor, version in passed.given)
            passed.given.clear()
            if changed and not look and number not in self._changed_in_place:
                raise SavedTensorChanged(
                    f"{self._name_of(number + 1)} changes in place what {self._name_of(number)} gave it, which it did not on its first "
                    "microbatch, so that R would see another input: use the operation that returns a new tensor"
                )
            if changed:
                self._changed_in_place.add(number)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        found = [parameter.grad for parameter in self._state.parameters]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in found]

    def _refuse_backward_inside(self, number: int, before: Sequence[tuple[Tensor | None, int]]) -> None:
        """In a pipeline forwards stand in another order than in the plain loop; and sums of floats depend on their order."""
        if any(new is not old or version != was for (new, version), (old, was) in zip(self._gradients(), before)):
            raise LayerRefused(
                f"{self._name_of(number)} calls backward() in its forward, which adds to .grad: gradients come from the loss alone. Give "
                "the local loss to pipetrain.add_loss, or take its gradient with torch.autograd.grad"
            )

    def _refuse_gradient_inside(self, late: LateBoundSet, number: int, error: BaseException | None) -> None:
        if late.wanted is not None and late.wanted.layer != number:
            self._refuse_gradient_through(late.wanted, number)
        if late.wanted is not None or late.hooks_refused or (error is not None and refuses_hooks(error)):
            raise LayerRefused(
                f"{self._name_of(number)} takes a gradient inside its forward, which it did not on its first microbatch: name it in "
                "recompute.keep_layers, or use recompute.mode=never"
            ) from None

    def _refuse_gradient_through(self, slot: Slot, number: int) -> NoReturn:
        raise LayerRefused(
            f"{self._name_of(number)} takes a gradient through {self._name_of(slot.layer)} inside its forward, whose saved tensors were not "
            "kept: with recompute.verify=first (the default) a layer that does so from its first microbatch on is known in "
            "time; else use recompute.mode=never"
        ) from None

    def _learn_who_reads(self, late: LateBoundSet, number: int) -> None:
        """A layer that reads slots in F, and those that it reads of, run without late binding from now on."""
        first = late.reads_from[number]
        through = "" if first == number else f"through {self._name_of(first)} "
        self._keep(
            late,
            range(first, number + 1),
            f"{self._name_of(number)} takes a gradient {through}inside its forward",
            free=True,
        )

    def _enter(
        self, given: StageInput, sink: dict[int, Tensor], *, clone: bool, is_late: bool
    ) -> tuple[Any, list[Entered]]:
        """The input tree as the first layer gets it, and what is looked at when the last one has run."""
        leaves = list(given.leaves)
        # A change through .data is looked for where the layers get a clone for the first time.
        look = not self._has_entered or (clone and not self._clones_inputs)
        entered: dict[int, Entered] = {}  # by the tensor that was given: it may stand in several leaves
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in entered:
                fixed = given.fixed.get(number, "")
                # A version counter of its own: microbatches are views of one batch and share theirs.
                tensor = leaf.clone() if clone and not fixed else leaf.data
                before = (leaf.clone() if fixed else leaf) if look and (fixed or clone) else None
                if number in given.wants_gradient:
                    tensor = Gate.apply(self._anchor, tensor, sink, number)  # type: ignore[no-untyped-call]
                entered[id(leaf)] = Entered.of(tensor, fixed, before)
            leaves[number] = entered[id(leaf)].tensor
        tensors = list(entered.values())
        if self.loss_fn is not None and (is_late or given.fixed_target):
            tensors += entered_targets(given.target, given.fixed_target, recomputed=is_late, look=look)
        return pytree.tree_unflatten(leaves, given.spec), tensors

    def _loss(self, loss_fn: LossFn, output: Any, given: StageInput, added: AddedLosses) -> Tensor:
        loss = loss_fn(output, given.target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {found}: it must return a 0-dim tensor: a mean over the rows of the "
                'microbatch, or their sum with Pipeline(..., loss_reduction="sum")'
            )
        return added.added_to(loss) * given.weight

    # R ------------------------------------------------------------------------------------------------------------

    def holds(self, microbatch: int) -> bool:
        """Whether there is something for R and B to do."""
        return microbatch in self._held

    def held_tensors(self, microbatch: int) -> list[Tensor]:
        """What the slots of this microbatch are filled with."""
        late = self._held[microbatch].late if microbatch in self._held else None
        return [] if late is None else late.tensors()

    def recompute(self, microbatch: int, part: int | None = None) -> None:
        """R: the stage's forward again, until the last slot is full. Its graph is thrown away.

        Raises:
            RecomputeMismatch: R did not do what F did.
            SavedTensorChanged: a parameter or the stashed input changed since F.
        """
        assert part is None, f"stage {self.index} has no parts"
        held = self._held[microbatch]
        given, late = held.given, held.late
        assert given is not None, f"stage {self.index} recomputes {microbatch}, whose set it keeps"
        assert late is not None
        self._check_parameters()
        if not len(late):
            late.drop()
            return
        late.start_recompute(Stop.AT_LAYER if self._stop is None else self._stop)
        try:
            with self._state.as_seen(held.seen):
                run_layer = functools.partial(self._recompute_layer, held, given)
                self._run(given, held, run_layer, clone=self._clones_inputs, is_forward=False)
        except SetComplete:
            pass
        finally:
            self._casts.end_recompute()
        size = self._sizes.setdefault((held.kind, False), SetSize())
        late.end_recompute(held.seen.storages(), size)
        if late.proof is None:
            self.set_bytes[microbatch] = late.num_bytes + late.set_bytes_before
        else:
            self._stop = max(late.proof.stop, self._stop or Stop.AT_SLOT)

    def _recompute_layer(self, held: _Held, given: StageInput, number: int, call: _Layer, value: Any) -> Any:
        late = held.late
        assert late is not None
        late.start_layer()
        if late.is_whole(number):
            return self._passed_again(held, number) if number in held.passed else value
        if self._casts.is_active():
            call = self._casts.once(number, call, make=False)
        self._seed(number, given)
        try:
            with late.hooks():
                return call(value)
        except BaseException as error:
            late.raise_what_was_meant()
            if refuses_hooks(error):
                late.fail("takes a gradient inside the layer (torch.func), which F did not")
            raise

    def _passed_again(self, held: _Held, number: int) -> Any:
        """What a kept layer has given in F, as its next layer gets it in R."""
        passed, own = held.passed[number], list[Any]()
        for leaf, wants in zip(passed.leaves, passed.wants_gradient):
            value = leaf
            if isinstance(leaf, Tensor):
                value = leaf.clone() if number in self._changed_in_place else leaf.data
            # Whether it needs a gradient decides what is saved; no leaf, as it may be changed in place.
            own.append(Gate.apply(self._anchor, value, {}, 0) if wants else value)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(own, passed.spec)

    # B ------------------------------------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, scale: float = 1.0, part: int | None = None
    ) -> list[Tensor | None]:
        """B: adds to `.grad` of the parameters; returns the gradient of each input leaf (None: it has none).

        `gradients` belong to the output leaves in order. With a loss they are ignored and the root is `scale`.
        Where F was told that B is split, this is I: what may wait does, until `backward_weights`.
        """
        assert part is None, f"stage {self.index} has no parts"
        held = self._held.pop(microbatch)
        shapes = iter(held.kinds)
        roots, seeds = [], []
        for number, root in enumerate(held.roots):
            if root is None:
                continue
            seed = gradients[number] if self.loss_fn is None else self._loss_gradient(next(shapes), scale)
            if seed is not None:
                roots.append(root)
                seeds.append(seed)
        del root
        held.roots.clear()
        if held.deferral is not None:
            self._deferred[microbatch] = held.deferral
        self._release(held)
        if held.late is not None:
            held.late.start_backward()
        if roots:
            with nullcontext() if held.deferral is None else held.deferral.open():
                self._run_backward(held, roots, seeds)
        if held.deferral is not None:  # its place must have room for either
            self.set_bytes[microbatch] = max(self.set_bytes.get(microbatch, 0), held.deferral.num_bytes)
        held.size = None
        if held.late is not None:
            held.late.assert_closed()
        return [held.sink.pop(leaf, None) for leaf in range(held.num_inputs)]

    def _run_backward(self, held: _Held, roots: Sequence[GradientEdge], seeds: Sequence[Tensor]) -> None:
        try:
            torch.autograd.backward(roots, seeds)
        except RuntimeError as error:
            node = changed_node(roots) if held.late is None else None
            if node is None:
                raise
            layer = bisect_left(held.ends, node._sequence_nr(), lo=1) - 1
            raise SavedTensorChanged(
                f"{self._name_of(layer)}: a tensor saved for backward by {node.name()} was changed in place before B read it. Its "
                "gradient would be wrong: use the operation that returns a new tensor (relu instead of relu_, x + y instead of x += y)"
            ) from error

    def backward_weights(self, microbatch: int) -> None:
        """W: adds to `.grad` of the weights what I has put off.

        Raises:
            SavedTensorChanged: what waited was changed in place.
        """
        self._deferred.pop(microbatch).run()

    def _loss_gradient(self, kind: tuple[torch.Size, torch.dtype], scale: float) -> Tensor:
        """What is back-propagated from the loss."""
        shape, dtype = kind
        return torch.full(shape, scale, dtype=dtype, device=self._device)

    def end_step(self) -> None:
        """All ops of a step have run: each input and each set that F or R brought has had its B."""
        assert not self._held, f"stage {self.index} still holds microbatches {', '.join(map(str, self._held))}"
        assert not self._deferred, (
            f"stage {self.index} has had no W of microbatches {', '.join(map(str, self._deferred))}"
        )
        self._end_step()

    def _end_step(self) -> None:
        self._casts.end_step()
        self._state.end_step()
        self._versions.clear()

    def _release(self, held: _Held) -> None:
        """Nobody counts the input any more, nor what a kept set shares with it or with the output: B lets go of both."""
        for _, key in held.counted:
            self._meter.release(key)
        held.counted.clear()

    def drop(self) -> None:
        """Forget everything that is held: a step has failed."""
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

    # Without a graph ----------------------------------------------------------------------------------------------

    def infer(self, given: StageInput, *, with_loss: bool, past: Past | None = None) -> StageOutput:
        """F without a graph; with the weighted loss at its end where that is wanted. `past`: going on from the tokens before.

        Then it runs in inference mode: of one token, a tenth of the time is what torch notes down of tensors for a later backward.
        """
        added = AddedLosses()
        value = added.take(pytree.tree_unflatten(list(given.leaves), given.spec))
        with torch.no_grad() if past is None else torch.inference_mode():
            for number, layer in enumerate(self.layers):
                if past is not None:
                    value = added.of(run_cached)(layer, value, past)
                    continue
                self._seed(number, given)
                value = added.of(layer)(value)
            if with_loss and self.loss_fn is not None:
                self._seed(len(self.layers), given)
                value = self._loss(added.of(self.loss_fn), value, given, added)
            elif with_loss:
                value = added.beside(value)
        leaves, spec = pytree.tree_flatten(without_local(value))
        return StageOutput(tuple(leaves), spec, (False,) * len(leaves))

    def prepare(self, past: Past) -> None:
        """What `infer` needs besides its input, while that is on its way."""
        with torch.inference_mode():
            for layer in self.layers:
                prepare_cached(layer, past)

    def _check_parameters(self) -> None:
        now = self._parameter_versions()
        if now == self._versions:
            return
        names = [
            f"{self._name_of(n)} {name}" for n, layer in enumerate(self.layers) for name, _ in layer.named_parameters()
        ]
        changed = [name for name, new, old in zip(names, now, self._versions) if new != old]
        raise SavedTensorChanged(
            f"{', '.join(changed[:3])} changed between F and R of one microbatch: change parameters after the step only"
        )

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for parameter in self._state.parameters]

    def _name_of(self, number: int) -> str:
        if number >= len(self.layers):
            return "loss_fn"
        return f"layer {self.first_layer + number} ({type(self.layers[number]).__name__})"


def _tensors_in(value: Any) -> list[Tensor]:
    """What a layer gets."""
    leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


_LOSS_WITHOUT_GRADIENT = (
    "loss_fn returned a loss that needs no gradient, although parameters of the model do: a layer or loss_fn cuts it off from "
    "them, as detach(), argmax(), item() and torch.no_grad() do. Use operations that have a gradient, or `evaluate` for a loss "
    "without one"
)
