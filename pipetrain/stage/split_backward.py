"""Backward in two halves: I computes the gradient of the input, W later those of the weights.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2: only the optimizer waits for the second half.

    F  apply           [1] the node notes the layer that runs
    I  backward        [2] `backward_input` runs; the tensors for `backward_weight` move into the `Deferral`, and the node is freed
    W  Deferral.run    [3] `backward_weight` runs; the gradients of a weight are summed, then added to `.grad` once, as in B

The gradient of a weight may wait for W if only split functions (`SplitFunction`) read the weight. (If another node reads it too, autograd
sums the gradients of all readers before it adds to `.grad`.) The graph of the first F that gives the weight to a split function shows its
readers. If a later F has another reader, I adds that reader's gradient to `.grad`, and W adds the rest: nothing is lost, but the last
bit may differ. If the gradient of a weight may not wait, both halves run in I.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from pipetrain.stage.casts import WeightCasts, has_compiled
from pipetrain.stage.errors import SavedTensorChanged
from pipetrain.stage.leaves import is_sharded, leaf_of, nodes_below
from pipetrain.stage.meter import ActivationMeter, CountedBytes, storages_of

_CALL = "_layer_call"  # the attribute of a node with its `LayerCall`


class SplitFunction(torch.autograd.Function):
    """An autograd function whose backward comes in two halves. For a kernel of your own, write a subclass with two more static methods:

    - `backward_input(ctx, *gradients)`: as `backward`, with None for each weight;
    - `backward_weight(ctx, *gradients)`: as `backward`, with None for everything else.

    The weights are the arguments that need a gradient and get None from `backward_input`. `backward_weight` may run after the graph
    is freed: its `ctx` has `saved_tensors`, `needs_input_grad` and attributes that were set on it. Where the backward is not split,
    `backward` of the subclass runs; if it has none, both methods run, one after the other.
    """

    backward_input: Callable[..., Any]
    backward_weight: Callable[..., Any]
    _whole: Callable[..., Any] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._whole = vars(cls).get("backward", cls._whole)
        cls.backward = staticmethod(functools.partial(_backward, cls))  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any, **named: Any) -> Any:
        output = super().apply(*args, **named)  # type: ignore[no-untyped-call]
        if (call := layer_in_force()) is not None and call.is_forward:
            nodes = [node for one in _as_tuple(output) if (node := getattr(one, "grad_fn", None)) is not None]
            if nodes:
                setattr(nodes[0], _CALL, call)
                call.deferral.weights.meet(args)
        return output


def _backward(function: type[SplitFunction], ctx: Any, *gradients: Tensor | None) -> Any:
    call: LayerCall | None = getattr(ctx, _CALL, None)
    deferral = None if call is None else call.deferral_of_i()
    if deferral is None and function._whole is not None:
        return function._whole(ctx, *gradients)
    given = _as_tuple(function.backward_input(ctx, *gradients))
    needed = zip(ctx.needs_input_grad, given)  # needs_input_grad may lack arguments that were left at their defaults
    places = [place for place, (needs, gradient) in enumerate(needed) if needs and gradient is None]
    if not places or (deferral is not None and deferral.takes(function, ctx, gradients, places)):
        return given
    late = _as_tuple(function.backward_weight(ctx, *gradients))
    return tuple(late[place] if place in places else gradient for place, gradient in enumerate(given))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class LayerCall:
    """A layer that runs in F or R with split functions. `hooks`: the saved-tensor hooks in force when it began."""

    deferral: Deferral
    layer: int
    hooks: Any
    is_forward: bool

    def deferral_of_i(self) -> Deferral | None:
        """The deferral, if this backward runs in I; None: F has not ended.

        If a layer takes a gradient of its own output while F runs, `refuse_layer` raises: the second derivative through split functions
        would be summed in another order than torch's.
        """
        refuse_layer, running = self.deferral.refuse_layer, layer_in_force()
        if refuse_layer is not None and running is not None and running.layer == self.layer:
            refuse_layer()
        return self.deferral if refuse_layer is None else None


IN_FORCE: ContextVar[LayerCall | None] = ContextVar("the layer that runs", default=None)


def layer_in_force() -> LayerCall | None:
    """The layer that runs on this thread with split functions."""
    return None if torch.compiler.is_compiling() else IN_FORCE.get()


# I and W --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Late:
    """The `backward_weight` of one node, which waits for W."""

    run: Callable[[], Any]
    weights: dict[int, Tensor]  # by index of the argument
    layer: int
    held: list[tuple[Tensor, int]]  # each tensor that `run` reads, with its version
    counted: CountedBytes  # in the meter, until this object is freed


class Deferral:
    """The weight gradients of one (stage, microbatch) that wait from its I to its W."""

    def __init__(self, weights: DeferredWeights, refuse_layer: Callable[[], NoReturn]) -> None:
        self.weights = weights
        self.refuse_layer: Callable[[], NoReturn] | None = refuse_layer  # None: F has ended
        self._late: deque[_Late] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that are held for W, each counted once, without weights and their casts."""
        tensors = [tensor for late in self._late for tensor, _ in late.held]
        sizes = {storage._cdata: storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}
        return sum(size for key, size in sizes.items() if not self.weights.meter.is_left_out(key))

    def takes(
        self, function: type[SplitFunction], ctx: Any, gradients: tuple[Tensor | None, ...], places: Sequence[int]
    ) -> bool:
        """Leave `backward_weight` of this node to W, if it may wait. Returns whether it may. W gets a copy of the ctx, because the node
        would keep alive all nodes that its backward leads to. `places` are the indices of the weights among the node's arguments.

        W also gets the `gradients` themselves, not views: while W holds a gradient, autograd does not take it as `.grad`, to which it
        would add in place.
        """
        layer = getattr(ctx, _CALL).layer
        weights = self.weights.that_may_wait(ctx, layer, places)
        if not weights:
            return False
        # Detached, because a tensor keeps alive the node that made it.
        saved = tuple(tensor if tensor is None else tensor.detach() for tensor in ctx.saved_tensors)
        copy = SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad)
        delattr(copy, _CALL)
        tensors = [tensor for tensor in (*saved, *gradients) if tensor is not None]
        held = [(tensor, tensor._version) for tensor in tensors]
        run = functools.partial(function.backward_weight, copy, *gradients)
        self._late.append(_Late(run, weights, layer, held, CountedBytes(self.weights.meter, 0, tensors)))
        return True

    def run(self) -> None:
        """W: compute the gradients that wait, in the order of I. Those of one weight are summed, as in autograd; their sum is then added to
        `.grad`. Raises SavedTensorChanged: a tensor that W needs was changed in place after I."""
        left = Counter(id(weight) for late in self._late for weight in late.weights.values())
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while self._late:
                late = self._late.popleft()
                for tensor, version in late.held:
                    if tensor._version != version:
                        raise SavedTensorChanged(
                            f"{self.weights.name_of(late.layer)}: a tensor {list(tensor.shape)} that W needs was changed in place after "
                            "I: a backward may change neither the gradient that it gets nor its saved tensors"
                        )
                gradients = _as_tuple(late.run())
                for place, weight in late.weights.items():
                    key, gradient = id(weight), gradients[place]
                    if gradient is not None:
                        sums[key] = sums[key] + gradient if key in sums else gradient
                    left[key] -= 1
                    if not left[key] and key in sums:
                        accumulate(weight, sums.pop(key))

    def drop(self) -> None:
        """Drop all that waits: the step has failed."""
        self._late.clear()


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, as autograd does without `create_graph`. If `.grad` is None, set it, in the parameter's strides and `grad_dtype`."""
    dtype = parameter.grad_dtype or gradient.dtype
    if parameter.grad is not None:
        parameter.grad += gradient.to(dtype)
    elif gradient.stride() == parameter.stride() and gradient.dtype == dtype:
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter, dtype=dtype).copy_(gradient)


# Which weights --------------------------------------------------------------------------------------------------------


def why_whole(weight: Tensor) -> str | None:
    """Why the gradient of `weight` may not wait for W; None: the weight itself gives no reason."""
    if type(weight) is not nn.Parameter:
        return "its weight is computed in its forward, or is of a subclass of nn.Parameter"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, which would run in I"
    return None


class DeferredWeights:
    """Knows for which weights of one stage the gradients may wait for W. `name_of(layer)` names a layer of the stage."""

    def __init__(
        self, layers: Sequence[nn.Module], name_of: Callable[[int], str], meter: ActivationMeter, casts: WeightCasts
    ) -> None:
        self.name_of, self.meter, self.cast = name_of, meter, casts.cast
        self.whole = frozenset(number for number, layer in enumerate(layers) if is_sharded(layer))
        self._layers = layers
        # Weight -> a reader other than split functions, or a hook on its gradient; "": neither.
        self._other_reader: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self._meets_new = False  # a split function got a weight whose readers are not known
        self._in_flight: WeakSet[Deferral] = WeakSet()
        self._told: set[tuple[int, str]] = set()
        for number, layer in enumerate(layers):
            if number in self.whole:
                self.tell(number, "fully_shard gathers its weights and reduces their gradients in a backward")
            elif has_compiled(layer):
                self.tell(number, "it is compiled, at least in part")

    def begin(self, refuse_layer: Callable[[], NoReturn]) -> Deferral:
        """The deferral of one microbatch, from its F to its W. `refuse_layer` raises out of a layer that cannot run with hooks."""
        if not self._in_flight:
            self._look_for_hooks()
        deferral = Deferral(self, refuse_layer)
        self._in_flight.add(deferral)
        return deferral

    def _look_for_hooks(self) -> None:
        """Find hooks on the nodes that accumulate gradients. Such a hook would run in I, when the gradient is not computed yet. Python can
        find these hooks only while no graph holds the node."""
        for number, layer in enumerate(self._layers):
            for parameter in layer.parameters():
                learns = parameter.requires_grad and why_whole(parameter) is None
                if learns and any(gc.get_referents(get_gradient_edge(parameter).node)):
                    self._other_reader[parameter] = why = "a hook on the node that accumulates its gradient"
                    self.tell(number, f"{why} would run in I")

    def meet(self, args: Sequence[Any]) -> None:
        """Called in F with the arguments of a split function. Notes whether a parameter is among them whose readers are not known yet."""
        self._meets_new |= any(isinstance(one, nn.Parameter) and one not in self._other_reader for one in args)

    def end_forward(self, deferral: Deferral, roots: Iterable[GradientEdge | None]) -> None:
        """End F: search the graph below `roots` for weights of split functions that other nodes read, too."""
        deferral.refuse_layer = None
        if not self._meets_new:
            return
        self._meets_new = False
        split, other = _readers([root.node for root in roots if root is not None])
        for leaf, layer in split.items():
            if leaf not in self._other_reader:
                self._other_reader[leaf] = name = other.get(leaf, "")
                if name:
                    self.tell(layer, f"{name} reads one of them, too")

    def that_may_wait(self, ctx: Any, layer: int, places: Sequence[int]) -> dict[int, Tensor]:
        """The weights at `places` among a node's arguments; empty if the gradient of one of them may not wait."""
        # The nodes that this node leads to, in the order of the arguments that need a gradient.
        before = iter(node for node, _ in ctx.next_functions if node is not None)
        leaves = {place: leaf_of(next(before)) for place, needs in enumerate(ctx.needs_input_grad) if needs}
        weights = {place: leaf for place in places if (leaf := leaves[place]) is not None and why_whole(leaf) is None}
        if len(weights) < len(places):
            self.tell(layer, "one of its weights is not a plain parameter, or has hooks")
            return {}
        return weights if all(self._other_reader.get(weight) == "" for weight in weights.values()) else {}

    def tell(self, layer: int, why: str) -> None:
        """Warn, once per reason, that gradients of a layer's weights do not wait for W."""
        if (layer, why) not in self._told:
            self._told.add((layer, why))
            warnings.warn(
                f"{self.name_of(layer)}: gradients of its weights stay in I and do not wait for W: {why}", stacklevel=2
            )


def _readers(roots: list[Node]) -> tuple[dict[Tensor, int], dict[Tensor, str]]:
    """The nodes that read the leaves below `roots`: leaf -> layer of a split function; leaf -> name of any other node."""
    split: dict[Tensor, int] = {}
    other: dict[Tensor, str] = {}
    for node in nodes_below(roots, set()):
        call: LayerCall | None = getattr(node, _CALL, None)
        for following, _ in node.next_functions:
            leaf = None if following is None else leaf_of(following)
            if leaf is not None and call is None:
                other[leaf] = node.name()
            elif leaf is not None and call is not None:
                split[leaf] = call.layer
    return split, other
