"""What layers have in common, by the modules themselves: only a rank that has them all can know.

A parameter that two stages share is refused before anything runs, be it one object or two that look into one memory. A buffer, or a
module with state of its own, may be shared as long as no forward changes it: a table of positions is right on every stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Layers = Mapping[int, nn.Module]  # by their place in the whole model


def tied_parameters(layers: Layers) -> tuple[tuple[str, str], ...]:
    """The parameters that two layers share: where each is first, and where it is again."""
    found: list[tuple[str, str]] = []
    first: dict[int, str] = {}
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            where = first.setdefault(id(parameter), here := f"{number}.{name}")
            if where != here:
                found.append((where, here))
    return tuple(found)


@dataclass(frozen=True)
class Overlap:
    """Two tensors that are, or look into, one memory. `has_parameter`: at least one of them is a parameter."""

    where: str
    here: str
    has_parameter: bool


def overlaps(layers: Layers) -> list[Overlap]:
    """Tensors of two layers that overlap in memory, in the order of the layers: of each, with the one before that ends last."""
    extents = sorted(_extents(layers))
    found: list[Overlap] = []
    furthest: tuple[str, int, int, str, bool] | None = None
    for extent in extents:
        device, start, end, name, is_parameter = extent
        if furthest is not None and furthest[0] == device and start < furthest[2]:
            where, here = sorted((furthest[3], name), key=_place)
            found.append(Overlap(where, here, is_parameter or furthest[4]))
        if furthest is None or furthest[0] != device or end > furthest[2]:
            furthest = extent
    return sorted(found, key=lambda pair: (_place(pair.where), _place(pair.here)))


def _place(name: str) -> tuple[int, str]:
    """A tensor's layer, and its name there."""
    number, _, rest = name.partition(".")
    return int(number), rest


def _extents(layers: Layers) -> Iterator[tuple[str, int, int, str, bool]]:
    """Device, first and last address, name, and whether it is a parameter, of each tensor that has memory."""
    for number, layer in layers.items():
        for is_parameter, named in ((True, layer.named_parameters()), (False, layer.named_buffers())):
            for name, tensor in named:
                if (start := _address(tensor)) and tensor.numel():
                    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                    yield (
                        str(tensor.device),
                        start,
                        start + span * tensor.element_size(),
                        f"{number}.{name}",
                        is_parameter,
                    )


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; 0 where it has no memory of its own (meta, sparse, lazy, a subclass that wraps others)."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


class SharedState:
    """What layers of several stages have in common and a forward could change: buffers, and plain attributes of a module."""

    def __init__(self, layers: Layers, stage_of: Callable[[int], int]) -> None:
        self._buffers: list[tuple[str, Callable[[], Tensor]]] = []
        self._modules: list[tuple[str, nn.Module]] = []
        self._looked: set[bool] = set()  # the modes in which buffers were compared by value
        for pair in overlaps(layers):
            said = _across("buffer", pair.where, pair.here, stage_of)
            if said and not pair.has_parameter:
                number, buffer = _place(pair.here)
                self._buffers.append((said, functools.partial(layers[number].get_buffer, buffer)))
        first: dict[int, str] = {}
        for place, layer in layers.items():
            for name, module in layer.named_modules():
                where = first.setdefault(id(module), here := f"{place}.{name}".rstrip("."))
                if said := _across(type(module).__name__, where, here, stage_of):
                    self._modules.append((said, module))

    @contextmanager
    def unchanged(self, *, is_training: bool) -> Iterator[None]:
        """Around the ops of a call.

        Raises:
            ValueError: what they changed, where it is shared.
        """
        if not self._buffers and not self._modules:
            yield
            return
        by_value = is_training not in self._looked  # batch_norm writes its running statistics without a new version
        before = self._now(by_value)
        yield
        self._looked.add(is_training)
        for (said, old), (_, new) in zip(before, self._now(by_value)):
            if not _same(old, new):
                raise ValueError(
                    f"{said}, and a forward changed it, so each stage would have another: give each stage one of its own "
                    "(copy.deepcopy), or choose a balance that puts both layers on one stage"
                )

    def _now(self, by_value: bool) -> list[tuple[str, Any]]:
        buffers = [
            (said, (get().detach().clone(), 0) if by_value else (None, get()._version)) for said, get in self._buffers
        ]
        return [*buffers, *((said, _plain_attributes(module)) for said, module in self._modules)]


def _across(what: str, where: str, here: str, stage_of: Callable[[int], int]) -> str:
    """How an error begins where the two names are of two stages; nothing where they are not."""
    stage, other = (stage_of(_place(name)[0]) for name in (where, here))
    return "" if stage == other else f"{what} {where} of stage {stage} is {here} of stage {other} as well"


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, complex, str, Tensor)) and name != "training"
    }


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        return isinstance(new, Tensor) and old.shape == new.shape and torch.equal(old, new)
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    return bool(old == new)
