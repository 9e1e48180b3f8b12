"""One microbatch at one stage: how its tensors enter F and R, the output of F, the losses that layers add to it (`pipetrain.add_loss`), and
what the stage holds from its F to its B."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.errors import input_changed
from pipetrain.stage.host_set import HostSet
from pipetrain.stage.layer_state import NO_COPIES
from pipetrain.stage.meter import CountedBytes, SetSize
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral
from pipetrain.stage.tensor_copies import TensorCopies, copy_of, is_dense, same_values, storage_key


class StageInput(NamedTuple):
    """The input of F. Several leaves may be one tensor: an in-place change of one leaf changes all of them.

    `seeds_of` returns the seeds of the layers with these global indices. `target` and `weight` are for the stage that computes the loss.
    After each layer, F calls `on_layer(global index, output)`; the output is a `WithLosses` once a layer has added a loss. The loss has the
    index after the last layer. `is_shared`: another stage of this rank reads the same memory, so layers that change it get a clone. Leaves
    in `fixed`, and leaves of the target in `fixed_target`, may never be changed in place; the values are texts for the error.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: frozenset[int]
    seeds_of: Callable[[Sequence[int]], list[int]]
    target: Any = None
    weight: float = 1.0
    on_layer: Callable[[int, Any], None] | None = None
    is_shared: bool = False
    fixed: Mapping[int, str] = MappingProxyType({})
    fixed_target: Mapping[int, str] = MappingProxyType({})


class StageOutput(NamedTuple):
    """The output of F, detached: the leaves of its tree, and which of them need a gradient. Leaves that are one tensor in the layers'
    output are one tensor here, too."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: tuple[bool, ...]


class StageLocal:
    """Holds any value, as one leaf of the tree that goes from layer to layer. In the output of a stage, None replaces it.

    The runtime does not look into it: its tensors are neither sent nor stashed, and get no gradient. Tensors in it that autograd saves
    belong to the activation set, and count once, even if several layers save them. They are freed at the end of F if R will run, else
    after B. A layer that gets None instead of a `StageLocal` makes a new one.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def without_local(tree: Any) -> Any:
    """The tree that leaves a stage, with None in place of each `StageLocal`; the same object if there is none."""
    if isinstance(tree, Tensor):
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    if not any(type(leaf) is StageLocal for leaf in leaves):
        return tree
    return pytree.tree_unflatten([None if type(leaf) is StageLocal else leaf for leaf in leaves], spec)


def lent_storages(leaves: Sequence[Any]) -> frozenset[int]:
    """The storages that are larger than the leaf in them, such as that of a batch of which the leaf is a slice."""
    return frozenset(
        storage_key(leaf)
        for leaf in leaves
        if isinstance(leaf, Tensor) and is_dense(leaf) and leaf.nbytes < leaf.untyped_storage().nbytes()
    )


_ONE_LEAF = pytree.tree_structure(0)  # the structure of a value that is one leaf


def detached(outputs: Any, roots: list[GradientEdge | None]) -> StageOutput:
    """The output of layers without its graph. `roots` gets each leaf's edge, or None. As stages hold edges only, sent outputs are freed."""
    leaves, spec = ([outputs], _ONE_LEAF) if isinstance(outputs, Tensor) else pytree.tree_flatten(outputs)
    results: list[Any] = []
    wants: list[bool] = []
    done: dict[int, Tensor] = {}
    for leaf in leaves:
        edge, is_tensor = None, isinstance(leaf, Tensor)
        if is_tensor and id(leaf) not in done:
            done[id(leaf)] = leaf.detach()
        if is_tensor and leaf.requires_grad:
            node = leaf.grad_fn
            if node is None or isinstance(node, torch._C._FunctionBase):  # its edge must own the graph
                edge = get_gradient_edge(leaf)
            else:  # the same, in half of the time
                edge = GradientEdge(node, leaf.output_nr)
        results.append(done[id(leaf)] if is_tensor else leaf)
        wants.append(edge is not None)
        roots.append(edge)
    return StageOutput(tuple(results), spec, tuple(wants))


# How tensors enter. Also checks whether layers have changed them in place ---------------------------------------------


class Gate(torch.autograd.Function):
    """Where a received tensor enters the graph of its stage, and where its gradient is picked up.

    A leaf with `.grad` would not do: no layer may change a leaf in place, and accumulation may change the gradient's strides, and so a last
    bit of later sums. `anchor` makes the output require a gradient. The graph does not hold the tensor itself.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor], leaf: int) -> Tensor:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.leaf = sink, leaf
        # Return `.data`: if a Function returns its input or a view, autograd forbids in-place changes.
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        if gradients[0] is not None:
            ctx.sink[ctx.leaf] = gradients[0]
        return None, None, None, None


# `Gate.apply` without its check for torch.func, which never runs around a stage. It takes half as long.
_apply = super(torch.autograd.Function, Gate).apply
# Torch's own node for a graph that no backward runs through, as that of R. It takes a third of the time of `Gate`.
_without_backward = torch._C._functions.DelayedError("no backward runs through the graph of a recompute", 2)
NODE_WITHOUT_BACKWARD = "Error"  # the name of its type


def through_gate(anchor: Tensor, tensor: Tensor, sink: dict[int, Tensor] | None = None, leaf: int = 0) -> Tensor:
    """`tensor` as it enters a graph: it needs a gradient, and is no leaf, because a layer may change it in place. `sink` gets the gradient;
    without it, no backward may run through the graph."""
    if sink is None:
        return _without_backward(anchor, tensor.data)[1]
    return _apply(anchor, tensor, sink, leaf)  # type: ignore[no-any-return, no-untyped-call]


Entered = tuple[Tensor, int, str, Tensor | None, bool]
"""A tensor that entered: `tensor, version, fixed, before, is_clone`. `fixed`: why no stage may change it, or empty. `before`: a copy of the
tensor, or the leaf from which it was cloned. A comparison with it finds changes through `.data`, which versions miss. `is_clone`: the tensor
is a clone of a leaf; ignored if `fixed`."""


class Entry:
    """The entry of one stage. Layers that are known to change the input in place get a clone, because R reads the input again.
    `title` names the stage in errors, `name_of` its layers up to the index `last`."""

    def __init__(self, anchor: Tensor, title: str, name_of: Callable[[int], str], last: int, has_loss: bool) -> None:
        self._anchor, self._title, self._name_of, self._last, self._has_loss = anchor, title, name_of, last, has_loss
        self._clones = False
        self._is_known = False  # whether the layers have run once

    def enter(
        self, given: StageInput, sink: dict[int, Tensor] | None, *, recomputed: bool, clone: bool = False
    ) -> tuple[Any, list[Entered]]:
        """The input tree for the first layer, and the tensors that `check` examines after the last layer. `sink` gets the gradients; R has
        none. `recomputed`: an R reads the input again. `clone`: clone the leaves even if no layer is known to change them."""
        clones = clone or ((recomputed or given.is_shared) and self._clones) or (given.is_shared and not self._is_known)
        # In the first run, and when the layers get their first clone, also look for changes through `.data`.
        look = not self._is_known or (clones and not self._clones)
        is_read_again = recomputed or given.is_shared
        leaves = list(given.leaves)
        watched: list[Entered] = []
        by_leaf: dict[int, Tensor] = {}  # id of a leaf -> what enters for it; several leaves may be one tensor
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in by_leaf:
                fixed = given.fixed.get(number, "")
                tensor = leaf.clone() if clones and not fixed else leaf
                before = (leaf.clone() if fixed else leaf) if look and (fixed or clones) else None
                if number in given.wants_gradient:
                    tensor = through_gate(self._anchor, tensor, sink, number)
                elif tensor is leaf:  # views of one batch share a version counter; `.data` gives each its own
                    tensor = leaf.data
                by_leaf[id(leaf)] = tensor
                if is_read_again or fixed:
                    watched.append((tensor, tensor._version, fixed, before, clones))
            leaves[number] = by_leaf[id(leaf)]
        if self._has_loss and (recomputed or given.fixed_target):
            target = given.target
            for number, leaf in enumerate([target] if isinstance(target, Tensor) else pytree.tree_leaves(target)):
                if isinstance(leaf, Tensor) and (recomputed or number in given.fixed_target):
                    fixed = given.fixed_target.get(number) or _TARGET_READ_AGAIN.format(number)
                    watched.append((leaf, leaf._version, fixed, leaf.clone() if look else None, False))
        return leaves[0] if given.spec.is_leaf() else pytree.tree_unflatten(leaves, given.spec), watched

    def check(self, entered: Sequence[Entered]) -> None:
        """Called after the layers have run. Raises SavedTensorChanged: they changed in place a tensor that something else reads."""
        self._is_known = True
        for tensor, version, fixed, before, is_clone in entered:
            if tensor._version == version and (before is None or same_values(tensor.detach(), before)):
                continue
            if fixed:
                layers = f"{self._name_of(0)} to {self._name_of(self._last)}"
                raise input_changed(f"{self._title}, from {layers}, changes in place: {fixed}")
            if not is_clone:
                raise input_changed(
                    f"{self._name_of(0)} changes the input of {self._title} in place, which it did not on its first microbatch, "
                    "so that R would see another input"
                )
            self._clones = True


_TARGET_READ_AGAIN = "leaf {} of its target, which loss_fn gets a second time when it is recomputed"


# Kept layers ----------------------------------------------------------------------------------------------------------


class Passed(NamedTuple):
    """A copy of a kept layer's output, from which R continues: the leaves of its tree, and which of them need a gradient."""

    leaves: list[Any]
    requires_grad: list[bool]
    spec: pytree.TreeSpec

    @staticmethod
    def of(output: Any) -> Passed:
        """Copies the output, because the next layer may change it in place."""
        leaves, spec = pytree.tree_flatten(output)
        copies = {id(leaf): copy_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        return Passed([copies.get(id(leaf), leaf) for leaf in leaves], requires_grad, spec)

    def again(self, anchor: Tensor) -> Any:
        """The copy as the next layer's input in R. The same leaves need a gradient as in F, since autograd saves tensors accordingly."""
        pairs = zip(self.leaves, self.requires_grad)
        leaves = [through_gate(anchor, leaf) if requires_grad else leaf for leaf, requires_grad in pairs]
        return pytree.tree_unflatten(leaves, self.spec)


# Losses that layers add -------------------------------------------------------------------------------------------------
#
# Their sum goes with the output from stage to stage:
#
# stage 0   a0, the sum of its losses    leaves the stage as one more output tensor, so B gets its gradient as that of any other output
# stage 1   a0 + a1
# last      loss_fn(...) + (a0 + a1)     times the weight of the microbatch

# The object whose `of_layer` `add_loss` appends to; None: no layer of a pipeline runs.
_IN_FORCE: ContextVar[AddedLosses | None] = ContextVar("added losses", default=None)
# The code through which every call of a module goes.
_CALLS = frozenset({nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__})


def add_loss(loss: Tensor) -> None:
    """In the forward of any layer of a pipeline, add `loss` to its microbatch's loss, for example for the load balance of experts.

    Like the loss of `loss_fn`, it is multiplied by the weight of its microbatch and back-propagated. The loss that `step` and `evaluate`
    return on every rank contains it. Added losses are summed in the order of the layers and of their calls, and the sum is added to the
    loss of `loss_fn`. `add_loss` has no effect in a recompute, in a call of the pipeline without a loss, and in a module that runs outside
    of a pipeline.

    Args:
        loss: 0-dim, of a floating-point dtype, on the layer's device; in a step it needs a gradient.

    Raises:
        ValueError: `loss` is not such a tensor, or needs no gradient in a step.
        RuntimeError: no forward of a module runs.
    """
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        found = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"add_loss was given {found}: give a 0-dim floating-point tensor, such as aux.mean()")
    is_compiling = torch.compiler.is_compiling()  # if so, leave out the checks that torch.compile cannot trace
    if not is_compiling and torch._C._current_graph_task_id() != -1:
        return  # torch.utils.checkpoint runs a forward again, in its backward
    in_force = _IN_FORCE.get()
    if in_force is not None:
        if in_force.needs_gradient and not loss.requires_grad:
            raise ValueError(
                "add_loss was given a loss that needs no gradient: detach(), item() and torch.no_grad() cut it off, or all that it is "
                "made from is frozen. In that case do not call add_loss"
            )
        in_force.of_layer.append(loss.clone())  # the layer may change its own tensor later
    elif not is_compiling and not _is_in_a_module():
        raise RuntimeError(
            "add_loss was called outside of a forward: call it in the forward of a layer of the pipeline; in loss_fn, add the term to "
            "the returned loss"
        )


def _is_in_a_module() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    return frame is not None


class WithLosses(NamedTuple):
    """The output of a stage with the 0-dim sum of all losses that were added in it and in the stages before."""

    output: Any
    losses: Tensor


class AddedLosses:
    """In its block `add_loss` appends to `of_layer`. `losses` has the sum from the stages before, then the losses of layers that have
    ended. `value` is the input of the stage's first layer."""

    __slots__ = ("_around", "losses", "needs_gradient", "of_layer", "value")

    def __init__(self, given: Any = None) -> None:
        is_with_losses = type(given) is WithLosses
        self.value = given.output if is_with_losses else given
        self.losses: list[Tensor] = [given.losses] if is_with_losses else []
        # A new list for each layer, because compiled code is specialised on its length.
        self.of_layer: list[Tensor] = []
        self.needs_gradient = torch.is_grad_enabled()
        self._around = _IN_FORCE.get()

    def __enter__(self) -> AddedLosses:
        _IN_FORCE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _IN_FORCE.set(self._around)

    def beside(self, output: Any) -> Any:
        """`output` with the sum of the losses so far; `output` itself if there are none."""
        return WithLosses(output, self._sum()) if self.losses else output

    def added_to(self, loss: Tensor) -> Tensor:
        """The loss of `loss_fn`, plus the losses that layers and `loss_fn` itself gave to `add_loss`."""
        self.losses += self.of_layer
        self.of_layer = []
        return loss + self._sum()

    def _sum(self) -> Tensor:
        first, *others = self.losses
        return sum(others, first)


# What a stage holds ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MicrobatchKind:
    """What all microbatches of one kind (shapes, modes, which tensors need a gradient) have in common; known once one has run.

    `others`: which leaves share storages with a kept set. Leaves are numbered: first the input's, then the output's.
    `is_plain`: F of a kept microbatch may run without hooks, because no later F changes a tensor that autograd saves.
    """

    has_run: bool = False
    others: tuple[int, ...] = ()
    is_plain: bool = False
    kept_size: SetSize = field(default_factory=SetSize)  # of a kept set
    size: SetSize = field(default_factory=SetSize)  # of a set that R fills


@dataclass(slots=True)
class Held:
    """All that a stage holds of a microbatch between its F and its B."""

    given: StageInput | None  # None for a kept set without R
    num_inputs: int
    kind: MicrobatchKind
    seeds: list[int]  # of the layers and the loss
    late: LateBoundSet | None = None  # None if F ran without hooks: autograd holds the kept set
    deferral: Deferral | None = None  # None: the backward is not split
    has_casts: bool = False
    seen: TensorCopies = NO_COPIES  # buffers as F saw them
    roots: list[GradientEdge | None] = field(default_factory=list)  # per output leaf, its edge; None: no gradient
    loss: tuple[torch.Size, torch.dtype] | None = None
    sink: dict[int, Tensor] = field(default_factory=dict)  # input leaf -> its gradient
    # Tensors that the meter counts, with their keys: the stashed input, and leaves that share storages with a kept set.
    counted: list[tuple[Tensor, int]] = field(default_factory=list)
    passed: dict[int, Passed] = field(default_factory=dict)  # by layer
    size: CountedBytes | None = None  # of a kept set, if F ran without hooks
    host_set: HostSet | None = None  # the storages of the set that go to host memory
    lent: frozenset[int] = frozenset()  # `lent_storages` of the input, which stay on the device
    ends: list[int] = field(default_factory=list)  # per layer, the sequence number of its last node in autograd
