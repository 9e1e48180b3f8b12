"""One stage on one rank: F, R and B of ONE microbatch. Knows nothing of other ranks, of order or of streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.layer_state import NOTHING_SEEN, LayerState, Seen
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.probe import HeldOutsideProbe
from pipetrain.stage.seeding import seed_generators
from pipetrain.stage.slots import (
    LateBoundSet,
    NeedsGradientInside,
    RecomputeMismatch,
    SavedTensorChanged,
    SetComplete,
)
from pipetrain.stage.tensor_copies import same_values

LossFn = Callable[[Any, Any], Tensor]

# What torch.func says where saved-tensor hooks are in force.
_FUNCTORCH_REFUSES = "don't yet support saved tensor hooks"


class _Gate(torch.autograd.Function):
    """Where a received tensor enters the graph of its stage, and where its gradient is picked up.

    A leaf with `.grad` would do, but accumulation may rewrite the strides of the gradient, which changes later sums by a
    bit, and a leaf cannot be changed in place by the first layer. `anchor` makes the output require a gradient; the
    tensor itself is not held by the graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor], leaf: int) -> Tensor:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.leaf = sink, leaf
        # Not a view: autograd forbids in-place changes of a view that a Function returns.
        alias = tensor.new_empty(0)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        if gradients[0] is not None:
            ctx.sink[ctx.leaf] = gradients[0]
        return None, None, None, None


@dataclass(frozen=True)
class StageInput:
    """What F gets: the leaves of a tree, which of them want a gradient, and the seed of each layer for this microbatch.

    `target` and `weight` are for the stage that computes the loss; a weight of 0 means that the microbatch does not count.
    `on_layer` is given the number and the output of each layer in F; the loss has the number after the last layer's.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: frozenset[int]
    seed_of: Callable[[int], int]
    target: Any = None
    weight: float = 1.0
    on_layer: Callable[[int, Any], None] | None = None


@dataclass(frozen=True)
class StageOutput:
    """What F gives, detached: the leaves of the output tree and which of them want a gradient."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: tuple[bool, ...]


@dataclass
class _Held:
    """What a stage holds of a microbatch between its F and its B."""

    given: StageInput | None  # None for a kept set: nothing will run again
    late: LateBoundSet
    parameter_versions: list[int]
    num_inputs: int
    counts: bool  # whether the microbatch weighs anything in the loss
    seen: Seen = NOTHING_SEEN  # the state that F saw
    roots: list[GradientEdge | None] = field(default_factory=list)  # an edge per output leaf that has a gradient
    kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)  # of the output leaves with a root
    sink: dict[int, Tensor] = field(default_factory=dict)  # input leaf -> its gradient
    keys: list[int] = field(default_factory=list)  # of the stashed input, in the meter


class Stage:
    """Consecutive layers and, on the last stage, the loss. `first_layer` is the global index of the first one."""

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        *,
        first_layer: int,
        device: torch.device,
        meter: ActivationMeter,
        loss_fn: LossFn | None = None,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.index = index
        self.layers = list(layers)
        self.first_layer = first_layer
        self.loss_fn = loss_fn
        self.set_bytes: dict[int, int] = {}  # microbatch -> bytes of its set, as last seen
        self.stash_bytes: dict[int, int] = {}  # microbatch -> bytes of its stashed input, as last seen
        self._device = device
        self._meter = meter
        self._share = share
        self._held: dict[int, _Held] = {}
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._gradient_inside: set[int] = set()
        self._clones_inputs = False
        self._state = LayerState(self.layers, loss_fn, self._name_of, device)
        self._probe = HeldOutsideProbe(self._name_of, meter)

    def layers_by_number(self) -> dict[int, nn.Module]:
        """The layers by their global index."""
        return {self.first_layer + number: layer for number, layer in enumerate(self.layers)}

    # F ------------------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int, given: StageInput, *, keep: bool) -> StageOutput:
        """F with a graph. With a loss, the output is the weighted loss; the stage's own output where the weight is 0.

        Raises:
            SavedTensorChanged, ValueError (a loss that is no scalar), or what a layer raises.
        """
        assert microbatch not in self._held, f"stage {self.index} runs F{microbatch} twice"
        before = self._meter.current_bytes
        held, outputs = self._forward_kept(given) if keep else self._forward_late(given)
        leaves, spec = pytree.tree_flatten(outputs)
        wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        held.roots = [get_gradient_edge(leaf) if wanted else None for leaf, wanted in zip(leaves, wants)]
        held.kinds = [(leaf.shape, leaf.dtype) for leaf, wanted in zip(leaves, wants) if wanted]
        held.late.end_forward(self._state.changing_storages())
        if any(wants):
            self._hold(microbatch, held, before)
        return StageOutput(tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec, wants)

    def _hold(self, microbatch: int, held: _Held, bytes_before: int) -> None:
        self._held[microbatch] = held
        if held.given is None:
            self.set_bytes[microbatch] = self._meter.current_bytes - bytes_before
        else:
            held.keys = [self._meter.hold(leaf) for leaf in held.given.leaves if isinstance(leaf, Tensor)]
            self.stash_bytes[microbatch] = self._meter.current_bytes - bytes_before

    def _forward_kept(self, given: StageInput) -> tuple[_Held, Any]:
        before = self._state.before_forward(recomputed=False)
        while True:
            held = self._start(given, keep=True)
            try:
                outputs = self._run(given, held, clone=False, on_layer=given.on_layer)
                break
            except _Restart:
                self._state.put_back(before)
        self._state.after_forward(before)
        return held, outputs

    def _forward_late(self, given: StageInput) -> tuple[_Held, Any]:
        before = self._state.before_forward(recomputed=True, leaves=given.leaves)
        probe = None if self._probe.done else self._probe
        while True:
            held = self._start(given, keep=False)
            if probe:
                probe.start()
            try:
                clone = self._clones_inputs or before.learning
                outputs = self._run(given, held, clone=clone, probe=probe, on_layer=given.on_layer)
                break
            except _Restart:
                self._state.put_back(before)
        held.seen = self._state.after_forward(before)
        if probe:
            probe.end(outputs, given.leaves)
        return held, outputs

    def _start(self, given: StageInput, *, keep: bool) -> _Held:
        late = LateBoundSet(self._name_of, self._meter, keep=keep, share=self._share)
        return _Held(None if keep else given, late, self._parameter_versions(), len(given.leaves), given.weight != 0)

    def _run(
        self,
        given: StageInput,
        held: _Held,
        *,
        clone: bool,
        probe: HeldOutsideProbe | None = None,
        on_layer: Callable[[int, Any], None] | None = None,
    ) -> Any:
        """All layers, and the loss."""
        value, entered = self._enter(given, held.sink, clone=clone)
        for number, layer in enumerate(self.layers):
            value = self._run_one(number, held, given, layer, value)
            if probe:
                probe.after_layer(number)
            if on_layer:
                on_layer(self.first_layer + number, value)
        if self.loss_fn is not None and given.weight != 0:
            value = self._run_one(len(self.layers), held, given, lambda output: self._loss(output, given), value)
            if on_layer:
                on_layer(self.first_layer + len(self.layers), value)
        if held.given is not None and (
            any(tensor._version != version for tensor, version in entered)
            # Through .data: looked at where the layers got a clone for the first time.
            or (clone and not self._clones_inputs and not _same_leaves(entered, given.leaves))
        ):
            self._input_changed(cloned=clone)
        return value

    def _input_changed(self, *, cloned: bool) -> None:
        """The layers changed their input in place: from now on they get a clone, so that the stash stays whole."""
        if not cloned:
            raise SavedTensorChanged(
                f"{self._name_of(0)} changes the input of stage {self.index} in place, which it did not on its first "
                "microbatch, so that R would see another input: use the operation that returns a new tensor"
            )
        self._clones_inputs = True

    def _run_one(self, number: int, held: _Held, given: StageInput, call: Callable[[Any], Any], value: Any) -> Any:
        held.late.start_layer()
        self._seed(number, given)
        try:
            with nullcontext() if number in self._gradient_inside else held.late.hooks():
                return call(value)
        except NeedsGradientInside:
            pass
        except RuntimeError as error:
            if _FUNCTORCH_REFUSES not in str(error):
                raise
        self._gradient_inside.add(number)
        warnings.warn(
            f"{self._name_of(number)} takes a gradient inside its forward: its saved tensors are kept from F to B and not "
            "recomputed",
            stacklevel=2,
        )
        raise _Restart

    def _enter(
        self, given: StageInput, sink: dict[int, Tensor], *, clone: bool
    ) -> tuple[Any, list[tuple[Tensor, int]]]:
        """The input tree as the first layer gets it, and its tensors with their versions."""
        leaves = list(given.leaves)
        entered = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            # A version counter of its own: microbatches are views of one batch and share theirs.
            tensor = leaf.clone() if clone else leaf.data
            if number in given.wants_gradient:
                tensor = _Gate.apply(self._anchor, tensor, sink, number)  # type: ignore[no-untyped-call]
            leaves[number] = tensor
            entered.append((tensor, tensor._version))
        return pytree.tree_unflatten(leaves, given.spec), entered

    def _loss(self, output: Any, given: StageInput) -> Tensor:
        assert self.loss_fn is not None
        loss = self.loss_fn(output, given.target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {found}: it must return a 0-dim tensor (a mean or a sum over the microbatch)"
            )
        return loss * given.weight

    # R ------------------------------------------------------------------------------------------------------------

    def recompute(self, microbatch: int) -> None:
        """R: the stage's forward again, until the last slot is full. Its graph is thrown away.

        Raises:
            RecomputeMismatch: R took another path than F.
            SavedTensorChanged: a parameter or the stashed input changed since F.
        """
        held = self._held[microbatch]
        given = held.given
        assert given is not None, f"stage {self.index} recomputes {microbatch}, whose set it keeps"
        self._check_parameters(held)
        if not len(held.late):
            return
        before = self._meter.current_bytes
        held.late.start_recompute()
        # F would reuse the casts that R makes here, and with them R's graph.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with self._state.as_seen(held.seen):
                self._run(given, held, clone=self._clones_inputs)
        except SetComplete:
            pass
        except _Restart:
            raise RecomputeMismatch("R took a gradient inside a layer's forward, which F did not") from None
        finally:
            torch.set_autocast_cache_enabled(cached)
        held.late.end_recompute(held.seen.storages())
        self.set_bytes[microbatch] = self._meter.current_bytes - before

    # B ------------------------------------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, scale: float = 1.0
    ) -> list[Tensor | None]:
        """B: adds to `.grad` of the parameters; returns the gradient of each input leaf (None: it has none).

        `gradients` belong to the output leaves in order. With a loss they are ignored and the root is `scale`.
        """
        held = self._held.pop(microbatch)
        shapes = iter(held.kinds)
        roots, seeds = [], []
        for number, root in enumerate(held.roots):
            if root is None:
                continue
            seed = gradients[number] if self.loss_fn is None else self._loss_gradient(held, next(shapes), scale)
            if seed is not None:
                roots.append(root)
                seeds.append(seed)
        del root
        held.roots.clear()
        if roots:
            torch.autograd.backward(roots, seeds)
        for key in held.keys:
            self._meter.release(key)
        held.late.assert_closed()
        return [held.sink.pop(leaf, None) for leaf in range(held.num_inputs)]

    def _loss_gradient(self, held: _Held, kind: tuple[torch.Size, torch.dtype], scale: float) -> Tensor:
        """What is back-propagated from the loss; zeros into the output of a microbatch that does not count."""
        shape, dtype = kind
        return torch.full(shape, scale if held.counts else 0.0, dtype=dtype, device=self._device)

    def assert_nothing_is_held(self) -> None:
        """The end of a step: each input and each set that F or R brought has had its B."""
        assert not self._held, f"stage {self.index} still holds microbatches {', '.join(map(str, self._held))}"

    def drop(self) -> None:
        """Forget everything that is held: a step has failed."""
        for held in self._held.values():
            for key in held.keys:
                self._meter.release(key)
        self._held.clear()

    # Without a graph ----------------------------------------------------------------------------------------------

    def infer(self, given: StageInput, *, with_loss: bool) -> StageOutput:
        """F without a graph; with the weighted loss at its end where that is wanted and the microbatch counts."""
        value = pytree.tree_unflatten(list(given.leaves), given.spec)
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                self._seed(number, given)
                value = layer(value)
            if with_loss and self.loss_fn is not None and given.weight != 0:
                self._seed(len(self.layers), given)
                value = self._loss(value, given)
        leaves, spec = pytree.tree_flatten(value)
        return StageOutput(tuple(leaves), spec, (False,) * len(leaves))

    def _seed(self, number: int, given: StageInput) -> None:
        seed = given.seed_of(self.first_layer + number)
        seed_generators(seed, self._device, python=self._state.draws_in_python[number])

    def _check_parameters(self, held: _Held) -> None:
        now = self._parameter_versions()
        if now == held.parameter_versions:
            return
        names = [
            f"{self._name_of(n)} {name}" for n, layer in enumerate(self.layers) for name, _ in layer.named_parameters()
        ]
        changed = [name for name, new, old in zip(names, now, held.parameter_versions) if new != old]
        raise SavedTensorChanged(
            f"{', '.join(changed[:3])} changed between F and R of one microbatch: change parameters after the step only"
        )

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for layer in self.layers for parameter in layer.parameters()]

    def _name_of(self, number: int) -> str:
        if number >= len(self.layers):
            return "loss_fn"
        return f"layer {self.first_layer + number} ({type(self.layers[number]).__name__})"


def _same_leaves(entered: list[tuple[Tensor, int]], leaves: Sequence[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return all(same_values(tensor, leaf) for (tensor, _), leaf in zip(entered, tensors))


class _Restart(Exception):
    """F must run again from its first layer, with one layer outside of the hooks."""
