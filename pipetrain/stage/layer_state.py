"""Buffers that forwards change: R must read the values that F read, and must leave the buffers as they were.

In the first F of a kind of step, buffers are compared before and after it. Those that differ are *known to change* and are copied before each
F that has an R. Small buffers are copied too, since they may start to change later. Of other buffers, the versions are compared.

    F    before = before_forward()     [1] copies of what may change
         seen = after_forward(before)  [2] in the first F: what has changed? Later: has anything changed that was not copied?
    R    with seen.stand_in(): ...     [3] copies replace the buffers during R; then the buffers are as before R
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pipetrain.stage.errors import StateChanged
from pipetrain.stage.seeding import draws_in_python, seeder
from pipetrain.stage.tensor_copies import TensorCopies, fingerprint, is_small, storage_key, version_of
from pipetrain.stage.traces import is_of_the_user


@dataclass
class Before:
    """The state before an F. `learning`: this F finds out what changes, so all buffers are copied and all parameters noted. Otherwise only
    the buffers that R needs are copied."""

    learning: bool
    buffers: TensorCopies
    watched: list[tuple[Tensor, int]] = field(default_factory=list)  # buffers that are not copied, with their versions
    # Parameters, with their versions and fingerprints.
    parameters: Sequence[tuple[Tensor, int, Tensor | None]] = field(default_factory=list)


_IS_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
PARAMETERS, BUFFERS = attrgetter("_parameters"), attrgetter("_buffers")  # of a module
NO_COPIES = TensorCopies(())
NOTHING_BEFORE = Before(False, NO_COPIES)


class LayerState:
    """The state of a stage's layers and loss. `name_of(number)` names a layer in an error; the loss has the last number."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss_fn: Callable[..., Any] | None,
        name_of: Callable[[int], str],
        device: torch.device,
    ) -> None:
        self._parts = (*layers, loss_fn)
        self._name_of = name_of
        self._device = device
        self.seeders: list[Callable[[int], object]] = []  # per layer, a function that seeds; the last: for the loss
        self.watched: list[list[tuple[str, nn.Module]]] = []  # by layer, modules that may have state in attributes
        self.parameters: list[nn.Parameter] = []  # of the layers, as of this step
        self.sight = 0  # a number for the present modules, modes, and parameters that need a gradient
        self._sights: dict[tuple[Any, ...], int] = {}
        self._modules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._changing: list[Tensor] = []  # buffers that were found to change
        self.normal: set[int] = set()  # ids of buffers of normalisation layers, whose versions miss changes
        self._last_buffers: list[Tensor] = []  # `_copied` and `_watched` were made from these
        self._copied: list[Tensor] = []
        self._watched: list[Tensor] = []
        self.is_learning = True  # the next F finds out again which buffers change
        self.look()
        for name, tensor in self._named_tensors():
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise ValueError(
                    f"{name} has no shape yet, as in a LazyLinear before its first forward: run the model once on a batch before it "
                    "is given to a pipeline, or use a layer with all its sizes"
                )
            if tensor.is_inference():
                raise ValueError(
                    f"{name} was made under torch.inference_mode(), so it cannot be trained: make or deepcopy the model outside of it"
                )

    def look(self) -> None:
        """Once per step, list the modules and their modes. After a change of either, the next F finds out again which buffers change."""
        of_layers = modules_below(self._parts[:-1])
        modules = of_layers if self._parts[-1] is None else modules_below(self._parts)
        modes = list(map(_IS_TRAINING, modules))
        self.parameters = tensors_below(of_layers, PARAMETERS)
        key = (*modes, *map(_REQUIRES_GRAD, self.parameters), *map(id, modules))
        self.sight = self._sights.setdefault(key, len(self._sights))
        if modes != self._modes or modules != self._modules:
            self._modules, self._modes = modules, modes
            self.is_learning = True
            # Running statistics change without a new version. That is safe, because no backward reads them.
            norms = [module for module in modules if isinstance(module, _NormBase)]
            self.normal = {id(buffer) for module in norms for buffer in module._buffers.values()}
            named = [layer.named_modules() for layer in self._parts[:-1] if isinstance(layer, nn.Module)]
            self.watched = [[pair for pair in one if is_of_the_user(type(pair[1]))] for one in named]
            self.seeders = [seeder(self._device, in_python=draws_in_python(part)) for part in self._parts]

    def before_forward(self, *, recomputed: bool) -> Before:
        """Called ahead of each F, after `look` in this step."""
        if self.is_learning:
            versions = [(parameter, version_of(parameter)) for parameter in tensors_below(self._modules, PARAMETERS)]
            parameters = [(parameter, version, fingerprint(parameter)) for parameter, version in versions]
            return Before(True, TensorCopies(tensors_below(self._modules, BUFFERS)), parameters=parameters)
        if not (recomputed and any(map(BUFFERS, self._modules))):
            return NOTHING_BEFORE
        buffers = tensors_below(self._modules, BUFFERS)
        if len(buffers) != len(self._last_buffers) or not all(map(is_, buffers, self._last_buffers)):
            self._sort_buffers(buffers)
        copies = TensorCopies(self._copied) if self._copied else NO_COPIES
        watched = [(buffer, version_of(buffer)) for buffer in self._watched] if self._watched else []
        return Before(False, copies, watched)

    def after_forward(self, before: Before, *, recomputed: bool) -> TensorCopies:
        """Called when F has ended. Returns, for R, copies of the buffers as F read them. Raises StateChanged: F changed a parameter, or a
        buffer that was not copied, so R cannot get its old value."""
        if before.learning:
            self._refuse_changed_parameters(before)
            self._changing = before.buffers.changed()
            self._sort_buffers(tensors_below(self._modules, BUFFERS))
            before.buffers = before.buffers.only(self._copied)
            self.is_learning = False
        if not recomputed:
            return NO_COPIES
        for buffer, version in before.watched:
            if version_of(buffer) != version:
                self.is_learning = True
                raise StateChanged(
                    f"{self.name_of_tensor(buffer)}, a tensor of {list(buffer.shape)}, is changed by a forward for the first time, and was "
                    "not copied before it, so that its recompute would see another value: let the first forward change it too, or keep the "
                    "sets of this stage with recompute.mode=never"
                )
        return before.buffers

    def live_storages(self) -> Set[int]:
        """The storages of buffers known to change, and of small buffers, which may start to change at any time. A later F may change these
        storages, so the end of F copies saved tensors that lie in them."""
        small = {storage_key(buffer) for buffer in tensors_below(self._modules, BUFFERS) if is_small(buffer)}
        return (small | set(map(storage_key, self._changing))) - {0}

    def _sort_buffers(self, buffers: list[Tensor]) -> None:
        """Divide the buffers into those that are copied before each F that has an R, and those whose version is watched."""
        self._last_buffers = buffers
        known = self.normal.union(map(id, self._changing))
        self._copied = [buffer for buffer in buffers if is_small(buffer) or id(buffer) in known]
        self._watched = [buffer for buffer in buffers if not is_small(buffer) and id(buffer) not in known]

    def _refuse_changed_parameters(self, before: Before) -> None:
        for parameter, version, was in before.parameters:
            # R and B compare versions, so they find a change that raised the version.
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

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs (name, tensor) of all parameters and buffers; a name begins with the layer's name."""
        for number, root in enumerate(self._parts):
            for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None:
                        yield f"{self._name_of(number)}{'.' * bool(path)}{path}.{name}", tensor

    def name_of_tensor(self, tensor: Tensor) -> str:
        return next((name for name, own in self._named_tensors() if own is tensor), "a tensor")


# Every step lists modules, parameters and buffers. These functions are ten times as fast as `nn.Module`'s -------------------


def modules_below(roots: Iterable[Any]) -> list[nn.Module]:
    """Every module below `roots` once, in the order of `nn.Module.modules`; roots that are no modules are skipped."""
    found: dict[nn.Module, None] = {}
    waiting = list(roots)[::-1]
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.Module) and module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
    return list(found)


def tensors_below(modules: Iterable[nn.Module], which: attrgetter[dict[str, Any]]) -> list[Any]:
    """Every parameter (`PARAMETERS`) or buffer (`BUFFERS`) of these modules once, in the order of `nn.Module.parameters`."""
    found: dict[int, Tensor] = {}
    for table in map(which, modules):
        for tensor in table.values():
            if tensor is not None:
                found[id(tensor)] = tensor
    return list(found.values())
