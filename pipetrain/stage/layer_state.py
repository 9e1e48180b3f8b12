"""Buffers that forwards change: R must see what F saw, and leave no trace.

The first F of a kind is compared with what was before it. What it changed is *known to change* and is copied before each F that has an R.
Small buffers are copied in any case, since some change only later; larger ones are watched by their version.

    F    before = before_forward()     [1] copies of what may change
         seen = after_forward(before)  [2] the first time: what has changed? else: has anything that was not copied?
    R    with as_seen(seen): ...       [3] the copies stand in; afterwards everything is as it was before R
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pipetrain.stage.errors import StateChanged
from pipetrain.stage.leaves import is_sharded
from pipetrain.stage.modules import buffers_in, modules_below, parameters_in
from pipetrain.stage.seeding import draws_in_python, seeder
from pipetrain.stage.tensor_copies import (
    TensorCopies,
    fingerprint,
    is_simple,
    is_small,
    storage_key,
    version_of,
)
from pipetrain.stage.traces import modules_of_the_user


@dataclass
class Before:
    """The state before an F. An F that learns fills all fields but `watched`; other Fs fill `buffers` and `watched` alone."""

    learning: bool
    buffers: TensorCopies
    watched: list[tuple[Tensor, int]] = field(default_factory=list)  # larger buffers, with their versions
    parameters: list[tuple[Tensor, int]] = field(default_factory=list)
    fingerprints: list[Tensor | None] = field(default_factory=list)
    structure: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Seen:
    """What an R must see."""

    buffers: TensorCopies
    normal: Set[int] = frozenset()  # buffers of normalisation layers, which get no new version

    def storages(self) -> set[int]:
        """Of the tensors that stand in for buffers in R: what R saves of them belongs to its microbatch alone."""
        return self.buffers.storages(self.normal) if self.buffers.tensors else set()


_IS_TRAINING, _REQUIRES_GRAD, _BUFFERS = attrgetter("training"), attrgetter("requires_grad"), attrgetter("_buffers")
NO_COPIES = TensorCopies(())
NOTHING_BEFORE = Before(False, NO_COPIES)
NOTHING_SEEN = Seen(NO_COPIES)


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
        self.seeders: list[
            Callable[[int], object]
        ] = []  # by layer, what sets the generators; that of the loss is the last
        self.watched: list[list[tuple[str, nn.Module]]] = []  # by layer, modules that may have state in attributes
        self.parameters: list[nn.Parameter] = []  # of the layers, as of this step
        self.sight = 0  # another number where modules, their modes, or what needs a gradient are others
        self._sights: dict[tuple[Any, ...], int] = {}
        self.is_looked_at = False  # in this step
        self._modules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._changing_buffers: dict[int, Tensor] = {}  # by identity
        self._changing_storages: frozenset[int] = frozenset()
        self._normal: set[int] = set()  # buffers of normalisation layers
        self._last_buffers: list[Tensor] = []  # those that were sorted into
        self._copied: list[Tensor] = []
        self._watched: list[Tensor] = []
        self._simple = True  # whether all that is copied is
        self._learning = True
        self.look()
        self._refuse_lazy()

    def end_step(self) -> None:
        """Whatever there is may be another before the next step."""
        self.is_looked_at = False

    def relearn(self) -> None:
        """The next F is compared as the first one was."""
        self._learning = True

    def before_forward(self, *, recomputed: bool) -> Before:
        """Called ahead of each F, when it was looked in this step."""
        if self._learning:
            return self._everything()
        if not (recomputed and any(map(_BUFFERS, self._modules))):
            return NOTHING_BEFORE
        buffers = self._buffers()
        if len(buffers) != len(self._last_buffers) or not all(map(is_, buffers, self._last_buffers)):
            self._sort_buffers(buffers)
        copies = TensorCopies(self._copied, simple=self._simple) if self._copied else NO_COPIES
        watched = [(buffer, version_of(buffer)) for buffer in self._watched] if self._watched else []
        return Before(False, copies, watched)

    def after_forward(self, before: Before, *, recomputed: bool) -> Seen:
        """Called when F has ended. Raises StateChanged: F has changed what an R cannot see as it was."""
        if before.learning:
            self._learn(before)
        if not recomputed or (not before.buffers.tensors and not before.watched):
            return NOTHING_SEEN
        for buffer, version in before.watched:
            if version_of(buffer) != version:
                self.relearn()
                raise StateChanged(
                    f"{self.name_of_tensor(buffer)}, a tensor of {list(buffer.shape)}, is changed by a forward for the first time, and was "
                    "not copied before it, so that its recompute would see another value: let the first forward change it too, or keep the "
                    "sets of this stage with recompute.mode=never"
                )
        return Seen(before.buffers, self._normal)

    def live_storages(self) -> Set[int]:
        """All storages that a later F may change, as far as they are looked after: what B reads of them has to be copied at the
        end of F. More than it is known to: a buffer may begin to change at any time."""
        small = {storage_key(buffer) for buffer in self._buffers() if is_small(buffer)}
        return (small | self._changing_storages) - {0}

    @contextmanager
    def as_seen(self, seen: Seen) -> Iterator[None]:
        """Around R: what F saw stands in; afterwards everything is as it was before R."""
        live = seen.buffers.stand_in()
        try:
            yield
        finally:
            seen.buffers.withdraw(live)

    def copies_of(self, number: int) -> TensorCopies:
        """The buffers of one layer, or of the loss, as they are now."""
        root = self._layers[number] if number < len(self._layers) else self._loss_fn
        return TensorCopies(root.buffers() if isinstance(root, nn.Module) else ())

    # What there is ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Once in a step: which modules there are, and in which modes. Learn again where one is new or was switched between train and eval."""
        self.is_looked_at = True
        of_layers = modules_below(self._layers)
        modules = of_layers if self._loss_fn is None else modules_below(self._roots)
        modes = list(map(_IS_TRAINING, modules))
        self.parameters = parameters_in(of_layers)
        key = (*modes, *map(_REQUIRES_GRAD, self.parameters), *map(id, modules))
        self.sight = self._sights.setdefault(key, len(self._sights))
        if modes != self._modes or modules != self._modules:
            self._modules, self._modes = modules, modes
            self._learning = True
            # They change without a new version, but no backward reads them.
            norms = [module for module in modules if isinstance(module, _NormBase)]
            self._normal = {id(buffer) for module in norms for buffer in module._buffers.values()}
            parts = (*self._layers, self._loss_fn)
            self.watched = [modules_of_the_user(layer) for layer in self._layers]
            self.seeders = [seeder(self._device, in_python=draws_in_python(part)) for part in parts]

    def _buffers(self) -> list[Tensor]:
        return buffers_in(self._modules)

    def _sort_buffers(self, buffers: list[Tensor]) -> None:
        """Which are copied before each F that has an R, and which watched."""
        self._last_buffers = buffers
        known = self._changing_buffers.keys() | self._normal
        self._copied = [buffer for buffer in buffers if is_small(buffer) or id(buffer) in known]
        self._watched = [buffer for buffer in buffers if not is_small(buffer) and id(buffer) not in known]
        self._simple = all(map(is_simple, self._copied))

    # Learning -----------------------------------------------------------------------------------------------------

    def _everything(self) -> Before:
        parameters = [parameter for module in self._modules for parameter in module._parameters.values()]
        distinct = list({id(parameter): parameter for parameter in parameters if parameter is not None}.values())
        return Before(
            True,
            TensorCopies(self._buffers()),
            parameters=[(parameter, version_of(parameter)) for parameter in distinct],
            fingerprints=[fingerprint(parameter) for parameter in distinct],
            structure=[(module, dict(module._parameters), dict(module._modules)) for module in self._modules],
        )

    def _learn(self, before: Before) -> None:
        self._refuse_new_parts(before)
        self._refuse_changed_parameters(before)
        changed = before.buffers.changed()
        self._changing_buffers = {id(buffer): buffer for buffer in changed}
        self._changing_storages = frozenset(map(storage_key, changed)) - {0}
        self._sort_buffers(self._buffers())
        before.buffers = before.buffers.only(self._copied)
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
                    f"{self.name_of_tensor(parameter)} is changed by the forward, through .data: in a pipeline the backward "
                    "of a microbatch runs after the forward of the next one, and would read another value. Change "
                    "parameters after the step, or make it a buffer (register_buffer)"
                )

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module with its name, which begins with that of its layer."""
        for number, root in enumerate((*self._layers, self._loss_fn)):
            for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
                yield f"{self._name_of(number)}{'.' * bool(path)}{path}", module

    def _refuse_lazy(self) -> None:
        for owner, module in self._named():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                    raise ValueError(
                        f"{owner}.{name} has no shape yet, as in a LazyLinear before its first forward: run the model once "
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

    def name_of_tensor(self, tensor: Tensor) -> str:
        for owner, module in self._named():
            for name, own in (*module._parameters.items(), *module._buffers.items()):
                if own is tensor:
                    return f"{owner}.{name}"
        return "a tensor"

    def _name_of_module(self, module: nn.Module) -> str:
        return next((name for name, found in self._named() if found is module), type(module).__name__)
