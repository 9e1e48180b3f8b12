"""What the forwards of a stage change outside of autograd: R must see what F saw, and leave no trace.

The first F is compared with what was before it: buffers, attributes of modules and of the loss, generators in attributes,
values of parameters. What it changed is *known to change* and is copied before each F that has an R. Small buffers are
copied in any case, since some change only later; larger ones are watched by their version.

    F    before = before_forward()     [1] copies of what may change
         seen = after_forward(before)  [2] the first time: what has changed? else: has anything that was not copied?
    R    with as_seen(seen): ...       [3] the copies stand in; afterwards everything is as it was before R
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pipetrain.stage.attributes import Attributes, StateChanged, changed_later, classes_of
from pipetrain.stage.leaves import is_sharded
from pipetrain.stage.seeding import draws_in_python
from pipetrain.stage.tensor_copies import (
    Storages,
    TensorCopies,
    fingerprint,
    is_simple,
    is_small,
    storage_key,
    version_of,
)


@dataclass
class Before:
    """What was before an F: as much of it as that F needs."""

    learning: bool
    recomputed: bool
    buffers: TensorCopies
    attributes: list[tuple[_Holder, Attributes]]
    watched: list[tuple[Tensor, int]] = field(default_factory=list)  # larger buffers, with their versions
    parameters: list[tuple[Tensor, int]] = field(default_factory=list)
    fingerprints: list[Tensor | None] = field(default_factory=list)
    structure: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    inputs: Attributes | None = None


@dataclass(frozen=True, eq=False)
class Seen:
    """What an R must see."""

    buffers: TensorCopies
    attributes: list[Attributes]
    normal: Set[int] = frozenset()  # buffers of normalisation layers, which get no new version

    def storages(self) -> set[int]:
        """Of the tensors that stand in for buffers in R: what R saves of them belongs to its microbatch alone."""
        return self.buffers.storages(self.normal)


NO_COPIES = TensorCopies(())
NOTHING_BEFORE = Before(False, False, NO_COPIES, [])
NOTHING_SEEN = Seen(NO_COPIES, [])


@dataclass(frozen=True, eq=False)
class _Holder:
    """Something that has attributes: a module, a class of the user's, or the loss."""

    layer: int
    name: str
    thing: Any


class LayerState:
    """The state of a stage's layers and loss. `name_of(number)` names a layer in an error; the loss has the last number."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss_fn: Callable[..., Any] | None,
        name_of: Callable[[int], str],
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._loss_fn = loss_fn
        self._name_of = name_of
        self._device = device
        self._roots = [*layers, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        self.draws_in_python: list[bool] = []  # by layer; the loss is the last
        self.parameters: list[nn.Parameter] = []  # of the layers, as of this step
        self.sight = 0  # another number where modules, their modes, or what needs a gradient are others
        self._sights: dict[tuple[Any, ...], int] = {}
        self._is_looked_at = False  # in this step
        self._modules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._changing: list[_Holder] = []  # whose attributes F changes
        self._changing_buffers: dict[int, Tensor] = {}  # by identity
        self._changing_storages: frozenset[int] = frozenset()
        self._changing_tensors: dict[int, Tensor] = {}  # in attributes, changed in place
        self._normal: set[int] = set()  # buffers of normalisation layers
        self._last_buffers: list[Tensor] = []  # those that were sorted into
        self._copied: list[Tensor] = []
        self._watched: list[Tensor] = []
        self._simple = True  # whether all that is copied is
        self._sharing = False  # whether what changes shares memory
        self._learning = True
        self.look()
        self._refuse_lazy()

    def look(self) -> None:
        """Once in a step: which modules there are, and in which modes."""
        if not self._is_looked_at:
            self._is_looked_at = True
            self._look_for_other_modules()

    def end_step(self) -> None:
        """Whatever there is may be another before the next step."""
        self._is_looked_at = False

    def relearn(self) -> None:
        """The next F is compared as the first one was."""
        self._learning = True

    def before_forward(self, *, recomputed: bool, leaves: Sequence[Any] = ()) -> Before:
        """Called ahead of each F. `leaves` are those of its input, among which may be objects that F fills."""
        self.look()
        inputs = _attributes_of_inputs(leaves) if recomputed else None
        if self._learning:
            before = self._everything()
            before.recomputed, before.inputs = recomputed, inputs
            return before
        if not recomputed:
            return NOTHING_BEFORE
        buffers = self._buffers()
        if len(buffers) != len(self._last_buffers) or not all(map(is_, buffers, self._last_buffers)):
            self._sort_buffers(buffers)
        storages: Storages | None = {} if self._sharing else None
        copies = TensorCopies(self._copied, storages, simple=self._simple) if self._copied else NO_COPIES
        attributes = self._note(self._changing, buffers, self._changing_tensors, storages) if self._changing else []
        watched = [(buffer, version_of(buffer)) for buffer in self._watched] if self._watched else []
        return Before(False, True, copies, attributes, watched, inputs=inputs)

    def after_forward(self, before: Before) -> Seen:
        """Called when F has ended.

        Raises:
            StateChanged: F has changed what an R cannot see as it was.
        """
        if before.learning:
            self._learn(before)
        if not before.recomputed:
            return NOTHING_SEEN
        for buffer, version in before.watched:
            if version_of(buffer) != version:
                self.relearn()
                raise changed_later(self._name_of_tensor(buffer), buffer)
        attributes = [noted for holder, noted in before.attributes if holder in self._changing]
        attributes += [before.inputs] if before.inputs is not None else []
        for noted in attributes:
            noted.settle()
        return Seen(before.buffers, attributes, self._normal)

    def live_storages(self) -> Set[int]:
        """All storages that a later F may change, as far as they are looked after: what B reads of them has to be copied at the
        end of F. More than it is known to: a buffer may begin to change at any time."""
        small = {storage_key(buffer) for buffer in self._buffers() if is_small(buffer)}
        return (
            small | {storage_key(buffer) for buffer in self._changing_buffers.values()} | self._changing_storages
        ) - {0}

    @contextmanager
    def as_seen(self, seen: Seen) -> Iterator[None]:
        """Around R: what F saw stands in; afterwards everything is as it was before R."""
        live = seen.buffers.stand_in()
        undo = [attributes.stand_in() for attributes in seen.attributes]
        try:
            yield
        finally:
            for withdraw in reversed(undo):
                withdraw()
            seen.buffers.withdraw(live)

    def put_back(self, before: Before) -> None:
        """Undo an F that has to run again."""
        before.buffers.put_back()
        for _, attributes in before.attributes:
            attributes.put_back()

    # One layer that has to run again ------------------------------------------------------------------------------

    def before_layer(self, number: int, before: Before) -> Before | None:
        """Called ahead of a layer in F: what to put back if this layer alone has to run again; None: `before` has to do."""
        if not before.learning:
            return None
        own, storages = self._things_of(number), dict[int, Any]()
        copies = TensorCopies(self._buffers_of(number), storages)
        holders = [holder for holder, _ in before.attributes if id(holder.thing) in own]
        return Before(True, False, copies, self._note(holders, self._buffers(), None, storages))

    def put_layer_back(self, number: int, before: Before, at_layer: Before | None) -> None:
        """Undo the layer that F is in, and nothing that a layer before it has done.

        Raises:
            StateChanged: it is not known what was before this layer.
        """
        if at_layer is not None:
            self.put_back(at_layer)
            return
        own = self._things_of(number)
        buffers = before.buffers.only(self._buffers_of(number))
        attributes = [(holder, noted) for holder, noted in before.attributes if id(holder.thing) in own]
        others = set().union(*(self._things_of(n) for n in range(len(self._layers) + 1) if n != number))
        known = before.recomputed and not own & others
        changing = any(id(holder.thing) in own for holder in self._changing)
        changing |= any(id(buffer) in self._changing_buffers for buffer in self._buffers_of(number))
        if not known and (changing or buffers.changed()):
            raise StateChanged(
                f"{self._name_of(number)} takes a gradient inside its forward, which it did not in its first one, and has to "
                "start again, but changes what nobody has noted for it: let its first forward take a gradient too"
            )
        self.put_back(Before(False, True, buffers, attributes))

    def _root(self, number: int) -> Any:
        return self._layers[number] if number < len(self._layers) else self._loss_fn

    def _buffers_of(self, number: int) -> list[Tensor]:
        root = self._root(number)
        return list(root.buffers()) if isinstance(root, nn.Module) else []

    def _things_of(self, number: int) -> set[int]:
        """The identities of all that has attributes in a layer, or in the loss."""
        root = self._root(number)
        modules = _modules_below([root]) if isinstance(root, nn.Module) else []
        return {id(root), *map(id, modules), *(id(kind) for module in modules for kind in classes_of(module))}

    # What there is ------------------------------------------------------------------------------------------------

    def _look_for_other_modules(self) -> None:
        """Learn again where a module is new or was switched between train and eval."""
        modules = _modules_below(self._roots)
        modes = [module.training for module in modules]
        self.parameters = [parameter for layer in self._layers for parameter in layer.parameters()]
        key = (*modes, *(parameter.requires_grad for parameter in self.parameters), *map(id, modules))
        self.sight = self._sights.setdefault(key, len(self._sights))
        if modes != self._modes or modules != self._modules:
            self._modules, self._modes = modules, modes
            self._learning = True
            self.draws_in_python = [draws_in_python(part) for part in (*self._layers, self._loss_fn)]

    def _buffers(self) -> list[Tensor]:
        """Each buffer once."""
        filled = [module._buffers for module in self._modules if module._buffers]
        found = {id(buffer): buffer for buffers in filled for buffer in buffers.values() if buffer is not None}
        return list(found.values())

    def _sort_buffers(self, buffers: list[Tensor]) -> None:
        """Which are copied before each F that has an R, and which watched."""
        self._last_buffers = buffers
        known = self._changing_buffers
        self._copied = [buffer for buffer in buffers if is_small(buffer) or id(buffer) in known]
        self._watched = [buffer for buffer in buffers if not is_small(buffer) and id(buffer) not in known]
        self._simple = all(map(is_simple, self._copied))

    def _note(
        self,
        holders: Sequence[_Holder],
        buffers: Sequence[Tensor],
        large: Container[int] | None,
        storages: Storages | None,
    ) -> list[tuple[_Holder, Attributes]]:
        if not holders:
            return []
        known = {*map(id, self._modules), *map(id, buffers)}
        return [(holder, Attributes([(holder.name, holder.thing)], known, large, storages)) for holder in holders]

    def _holders(self) -> list[_Holder]:
        """Everything with attributes, once, under the name of the first layer that has it."""
        found: dict[int, _Holder] = {}
        for number, layer in enumerate(self._layers):
            for path, module in layer.named_modules():
                owner = f"{self._name_of(number)}{'.' * bool(path)}{path}"
                found.setdefault(id(module), _Holder(number, owner, module))
                for kind in classes_of(module):
                    found.setdefault(id(kind), _Holder(number, f"{owner}: class {kind.__name__}", kind))
        if self._loss_fn is not None:
            last = len(self._layers)
            modules = self._loss_fn.named_modules() if isinstance(self._loss_fn, nn.Module) else [("", self._loss_fn)]
            for path, module in modules:
                found.setdefault(id(module), _Holder(last, f"loss_fn{'.' * bool(path)}{path}", module))
        return list(found.values())

    # Learning -----------------------------------------------------------------------------------------------------

    def _everything(self) -> Before:
        buffers = self._buffers()
        storages: Storages = {}
        copies = TensorCopies(buffers, storages)
        attributes = self._note(self._holders(), buffers, None, storages)
        parameters = [parameter for module in self._modules for parameter in module._parameters.values()]
        distinct = list({id(parameter): parameter for parameter in parameters if parameter is not None}.values())
        return Before(
            True,
            True,
            copies,
            attributes,
            parameters=[(parameter, version_of(parameter)) for parameter in distinct],
            fingerprints=[fingerprint(parameter) for parameter in distinct],
            structure=[(module, dict(module._parameters), dict(module._modules)) for module in self._modules],
        )

    def _learn(self, before: Before) -> None:
        self._refuse_new_parts(before)
        self._refuse_changed_parameters(before)
        buffers = before.buffers.changed()
        tensors = [tensor for _, noted in before.attributes for tensor in noted.changed_tensors()]
        self._changing_buffers = {id(buffer): buffer for buffer in buffers}
        self._changing_tensors = {id(tensor): tensor for tensor in tensors}
        self._changing = [holder for holder, noted in before.attributes if noted.changed()]
        keys = [storage_key(tensor) for tensor in {**self._changing_buffers, **self._changing_tensors}.values()]
        self._sharing = len(set(keys)) < len(keys)
        # Not those of normalisation layers: they change without a new version, but no backward reads them.
        norms = [module for module in self._modules if isinstance(module, _NormBase)]
        self._normal = {id(buffer) for module in norms for buffer in module._buffers.values()}
        self._changing_storages = frozenset({storage_key(tensor) for tensor in (*buffers, *tensors)} - {0})
        before.buffers = before.buffers.only(
            [b for b in before.buffers.tensors if is_small(b) or id(b) in self._changing_buffers]
        )
        self._sort_buffers(self._buffers())
        self._learning = False

    def _refuse_changed_parameters(self, before: Before) -> None:
        for (parameter, version), was in zip(before.parameters, before.fingerprints):
            # A change that bumps the version is seen where it matters: at R, and when a saved tensor is read.
            if was is None or version_of(parameter) != version:
                continue
            now = fingerprint(parameter)
            assert now is not None
            if not torch.equal(now, was):
                raise StateChanged(
                    f"{self._name_of_tensor(parameter)} is changed by the forward, through .data: in a pipeline the backward "
                    "of a microbatch runs after the forward of the next one, and would read another value. Change "
                    "parameters after the step, or make it a buffer (register_buffer)"
                )

    def _refuse_lazy(self) -> None:
        for holder in self._holders():
            if not isinstance(holder.thing, nn.Module):
                continue
            for name, tensor in (*holder.thing._parameters.items(), *holder.thing._buffers.items()):
                if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                    raise ValueError(
                        f"{holder.name}.{name} has no shape yet, as in a LazyLinear before its first forward: run the model once "
                        "on a batch before it is given to a pipeline, or use a layer with all its sizes"
                    )

    def _refuse_new_parts(self, before: Before) -> None:
        if any(map(is_sharded, self._roots)):
            return  # fully_shard puts gathered parameters in the place of a layer's, and takes them away
        for module, parameters, modules in before.structure:
            # As dicts: those of a module of torch.jit have no `get`.
            for was, now in ((parameters, dict(module._parameters)), (modules, dict(module._modules))):
                names = [name for name in {**was, **now} if was.get(name) is not now.get(name)]
                if names:
                    raise StateChanged(
                        f"{self._name_of_module(module)}: its forward makes or replaces {names[0]}, a parameter or a "
                        "module: make it in __init__, so that the recompute and the optimizer know the same one"
                    )

    def _name_of_tensor(self, tensor: Tensor) -> str:
        for holder in self._holders():
            if isinstance(holder.thing, nn.Module):
                for name, own in (*holder.thing._parameters.items(), *holder.thing._buffers.items()):
                    if own is tensor:
                        return f"{holder.name}.{name}"
        return "a tensor"

    def _name_of_module(self, module: nn.Module) -> str:
        return next((holder.name for holder in self._holders() if holder.thing is module), type(module).__name__)


def _modules_below(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module once; nn.Module.modules is ten times slower, and this runs before every F."""
    found: dict[nn.Module, None] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting.extend(module._modules.values())  # type: ignore[arg-type]
    return list(found)


def _attributes_of_inputs(leaves: Sequence[Any]) -> Attributes | None:
    objects = [(f"inputs leaf {n}", leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
    return Attributes(objects) if objects else None
