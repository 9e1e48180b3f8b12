"""Which gradients of a stage's weights may be put off from I to W, and its layers run so that they can be.

A weight may wait if split functions alone read it: another reader's gradient would have to be summed with theirs first. Who
reads it is seen in the graph of the first F that gives it to a split function. Should a later F read it in another way, too, its
gradient is whole all the same: the other reader's part is added in I, the rest in W; it may differ in the last bit.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from pipetrain.stage.casts import WeightCasts
from pipetrain.stage.leaves import is_sharded, leaf_of
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.split_function import NOTE, Deferral, User, in_force, why_whole
from pipetrain.stage.split_linear import hooks_in_force, linears_split

_NOBODY = ""
_Layer = Callable[[Any], Any]


class DeferredWeights:
    """What is known of the weights of one stage. `name_of(layer)` names a layer of the stage."""

    def __init__(
        self, layers: Sequence[nn.Module], name_of: Callable[[int], str], meter: ActivationMeter, casts: WeightCasts
    ) -> None:
        self.name_of = name_of
        self.cast = casts.cast
        self._layers = layers
        self._meter = meter
        # Weight -> what reads it besides split functions, or looks at its gradient.
        self._other_reader: MutableMapping[nn.Parameter, str] = WeakIdKeyDictionary()
        self._in_flight: WeakSet[Deferral] = WeakSet()
        self._told: set[tuple[int, str]] = set()
        self._whole = frozenset(number for number, layer in enumerate(layers) if is_sharded(layer))
        for number, layer in enumerate(layers):
            if number in self._whole:
                self.tell(number, "fully_shard gathers its weights and reduces their gradients in a backward")
            elif any(map(_is_compiled, layer.modules())):
                self.tell(number, "it is compiled, at least in part")

    def begin(self, start_again: Callable[[], NoReturn]) -> Deferral:
        """For one microbatch, from its F to its W. `start_again` gets out of the layer that F is in, and runs it without hooks."""
        if not self._in_flight:
            self._look_for_hooks()
        deferral = Deferral(self, self._meter, start_again)
        self._in_flight.add(deferral)
        return deferral

    def _look_for_hooks(self) -> None:
        """Hooks on the nodes that accumulate would run in I, too, where there is nothing to accumulate. Python sees them as long as no
        graph holds the node."""
        for number, layer in enumerate(self._layers):
            for parameter in layer.parameters():
                learns = parameter.requires_grad and why_whole(parameter) is None
                if learns and any(gc.get_referents(get_gradient_edge(parameter).node)):
                    self._other_reader[parameter] = why = "a hook on the node that accumulates its gradient"
                    self.tell(number, f"{why} would run in I")

    def layers_for(self, deferral: Deferral, *, is_forward: bool) -> list[_Layer]:
        """The layers of the stage as F or R of this microbatch calls them."""

        return [self.split(deferral, n, layer, is_forward=is_forward) for n, layer in enumerate(self._layers)]

    def split(self, deferral: Deferral, number: int, layer: _Layer, *, is_forward: bool) -> _Layer:
        """The layer of this number, or a copy of it, so that it runs with split functions."""
        if number in self._whole:
            return layer

        def call(value: Any) -> Any:
            # Without hooks the layer is one that takes gradients inside of its forward.
            if (hooks := hooks_in_force()) is None:
                return layer(value)
            with in_force(User(deferral, number, hooks, is_forward)), linears_split():
                return layer(value)

        return call

    def end_forward(self, deferral: Deferral, roots: Iterable[GradientEdge | None]) -> None:
        """F has ended, and I will go back from `roots`: who reads the weights that were given to split functions?"""
        deferral.start_again = None
        new = [(weight, layer) for weight, layer in deferral.parameters.values() if weight not in self._other_reader]
        if not new:
            return
        others = _other_readers(root.node for root in roots if root is not None)
        for weight, layer in new:
            self._other_reader[weight] = other = others.get(id(weight), _NOBODY)
            if other:
                self.tell(layer, f"its weight is read by {other}, too")

    def may_wait(self, parameter: nn.Parameter) -> bool:
        return self._other_reader.get(parameter) == _NOBODY

    def tell(self, layer: int, why: str) -> None:
        if (layer, why) not in self._told:
            self._told.add((layer, why))
            warnings.warn(
                f"{self.name_of(layer)}: gradients of its weights stay in I and do not wait for W: {why}", stacklevel=2
            )


def _is_compiled(module: nn.Module) -> bool:
    # torch._dynamo takes a second to import, for a name.
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _other_readers(roots: Iterable[Node]) -> dict[int, str]:
    """The leaves below `roots`, by identity, that a node reads which is not of a split function; and that node's name."""
    others: dict[int, str] = {}
    walked: set[Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node in walked:
            continue
        walked.add(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            if type(following).__name__ != "AccumulateGrad":
                todo.append(following)
            elif not hasattr(node, NOTE):
                others[id(leaf_of(following))] = node.name()
    return others
