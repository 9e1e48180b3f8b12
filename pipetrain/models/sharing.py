"""What layers have in common, by the modules themselves: only a rank that has them all can know.

A parameter that two stages share is one weight in two copies: a `Tie`. Memory that two parameters share otherwise is refused before
anything runs. A buffer, or a module with state of its own, may be shared as long as no forward changes it: a table of positions is
right on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
class Tie:
    """One parameter of two stages: what it is called in the lower one, which is its name in the whole model, and in the higher one."""

    name: str
    copy: str
    stages: tuple[int, int]

    @property
    def layers(self) -> tuple[int, int]:
        """Where the two names are."""
        return _place(self.name)[0], _place(self.copy)[0]


def ties_of(tied: Iterable[tuple[str, str]], stage_of: Callable[[int], int]) -> tuple[Tie, ...]:
    """The pairs of names `tied` that lie in two stages, in the order of their names. Raises ValueError: more than two stages share one."""
    found = []
    for names in groups_of(tied):
        first: dict[int, str] = {}
        for name in names:
            first.setdefault(stage_of(_place(name)[0]), name)
        if len(first) > 2:
            places = ", ".join(f"{name} of stage {stage}" for stage, name in first.items())
            raise ValueError(
                f"{places} are one parameter: two stages may share one, not {len(first)}; choose a balance that puts more of these "
                "layers on one stage, or untie them"
            )
        if len(first) == 2:
            (low, name), (high, copy) = first.items()
            found.append(Tie(name, copy, (low, high)))
    return tuple(found)


def groups_of(tied: Iterable[tuple[str, str]]) -> list[list[str]]:
    """All names of each parameter that has several, in the order of the layers."""
    group_of: dict[str, list[str]] = {}
    for pair in tied:
        names = list(dict.fromkeys(name for one in pair for name in group_of.get(one, [one])))
        group_of |= dict.fromkeys(names, names)
    distinct = {id(names): names for names in group_of.values()}
    return [sorted(names, key=lambda name: _place(name)[0]) for names in distinct.values()]


def put_in_place(layers: Layers, name: str, parameter: nn.Parameter) -> None:
    """Make `parameter` what `name` is, in whatever modules of the layer it is. Raises ValueError: it has another shape."""
    number, rest = _place(name)
    old = layers[number].get_parameter(rest)
    if old.shape != parameter.shape:
        raise ValueError(
            f"{name} is {list(old.shape)}, and {list(parameter.shape)} is to be in its place: they are no one parameter"
        )
    for module in (module for layer in layers.values() for module in layer.modules()):
        for key, own in module._parameters.items():
            if own is old:
                module._parameters[key] = parameter


def parameter_of(layers: Layers, name: str) -> nn.Parameter | None:
    """What is called `name` in the whole model; None where its layer is not among these. Raises ValueError: the layer has no such parameter."""
    number, rest = _place(name)
    if number not in layers:
        return None
    try:
        return layers[number].get_parameter(rest)
    except AttributeError:
        raise ValueError(
            f"layer {number} ({type(layers[number]).__name__}) has no parameter {rest}, which is said to be tied"
        ) from None


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
                    end = start + span * tensor.element_size()
                    yield str(tensor.device), start, end, f"{number}.{name}", is_parameter


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
        # How an error begins, the module that holds the state, and the name of the buffer: empty for the module's own attributes.
        self._states: list[tuple[str, nn.Module, str]] = []
        self._looked: set[bool] = set()  # the modes in which buffers were compared by value
        for pair in overlaps(layers):
            said = _across("buffer", pair.where, pair.here, stage_of)
            if said and not pair.has_parameter:
                number, name = _place(pair.here)
                self._states.append((said, layers[number], name))
        first: dict[int, str] = {}
        for place, layer in layers.items():
            for name, module in layer.named_modules():
                where = first.setdefault(id(module), here := f"{place}.{name}".rstrip("."))
                if said := _across(type(module).__name__, where, here, stage_of):
                    self._states.append((said, module, ""))

    def __len__(self) -> int:
        return len(self._states)

    @contextmanager
    def unchanged(self, *, is_training: bool) -> Iterator[None]:
        """Around the ops of a call. Raises ValueError: what they changed, where it is shared."""
        by_value = is_training not in self._looked  # batch_norm writes its running statistics without a new version
        before = [_state_of(module, buffer, by_value) for _, module, buffer in self._states]
        yield
        self._looked.add(is_training)
        for (said, module, buffer), old in zip(self._states, before):
            new = _state_of(module, buffer, by_value)
            if old.keys() != new.keys() or not all(_same(old[key], new[key]) for key in old):
                raise ValueError(
                    f"{said}, and a forward changed it, so each stage would have another: give each stage one of its own "
                    "(copy.deepcopy), or choose a balance that puts both layers on one stage"
                )


def _across(what: str, where: str, here: str, stage_of: Callable[[int], int]) -> str:
    """How an error begins where the two names are of two stages; nothing where they are not."""
    stage, other = (stage_of(_place(name)[0]) for name in (where, here))
    return "" if stage == other else f"{what} {where} of stage {stage} is {here} of stage {other} as well"


def _state_of(module: nn.Module, buffer: str, by_value: bool) -> dict[str, Any]:
    """The value or the version of a buffer; without its name the values of the module's plain attributes."""
    if buffer:
        tensor = module.get_buffer(buffer)
        return {buffer: tensor.detach().clone() if by_value else tensor._version}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, complex, str, Tensor)) and name != "training"
    }


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        return isinstance(new, Tensor) and old.shape == new.shape and torch.equal(old, new)
    return bool(old == new)
