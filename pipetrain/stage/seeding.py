"""Random numbers that do not depend on the cut into stages: each layer gets a seed of its own for each microbatch.

F and R set the same seed before the layer, so no dropout mask need be stashed. A model cut into four stages draws the same masks as
the model in one piece.
"""

from __future__ import annotations

import dis
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_NUMPY = "numpy.random"
_DRAW_FROM_TORCH = frozenset({"torch", "pipetrain"})  # packages that draw only from the generators of torch
_DYNAMIC = frozenset({"__import__", "eval", "exec"})  # functions that may run any code
_OF_MODULES = frozenset(vars(nn.Module()))
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 64-bit seed from several integers; each integer changes all bits (SplitMix64, Steele et al. 2014, figure 15)."""
    state = 0
    for number in numbers:
        state = _mixed(state, number)
    return state


def _mixed(state: int, number: int) -> int:
    state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def layer_seeds(seed: int, step: int, microbatch: int, layers: Sequence[int]) -> list[int]:
    """The seeds of some layers for one microbatch. `microbatch` is counted over all replicas, `layers` over the whole model."""
    before = _mixed(_mixed(_mixed(0, seed), step), microbatch)
    return list(map(partial(_mixed, before), layers))


def weight_seed(seed: int, layer: int) -> int:
    """The seed from which the weights of a layer are drawn when a rank builds it."""
    return mix(seed, layer)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of Python, of numpy if it is loaded, and of torch for the CPU and `device`. (`torch.manual_seed` seeds
    every back-end of the machine, which would be too slow for each layer of each microbatch.)"""
    seeder(device, in_python=True)(seed)


def seeder(device: torch.device, *, in_python: bool) -> Callable[[int], object]:
    """A function that seeds torch's default generators for the CPU and `device`. `in_python`: it also seeds those of Python, and of numpy
    if it is loaded, which takes ten times as long."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    elif not in_python:
        return torch.default_generator.manual_seed

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)
        if in_python:
            random.seed(number)
            if (numpy_random := sys.modules.get(_NUMPY)) is not None:
                numpy_random.seed(number & 0xFFFFFFFF)

    return seed


def draws_in_python(layer: Any) -> bool:
    """Whether a layer or a loss may draw from generators of Python or numpy. False only if it names no code but torch's and pipetrain's."""
    if not isinstance(layer, nn.Module):
        return not (isinstance(layer, types.FunctionType) or _is_of_torch(layer)) or _may_draw(layer)
    return any(
        bool(module._forward_hooks or module._forward_pre_hooks) or any(map(_may_draw, _held_by(module)))
        for module in layer.modules()
    )


def _held_by(module: nn.Module) -> Iterator[Any]:
    """The attributes of a module, and the methods and attributes of its classes. Classes of torch and pipetrain are skipped."""
    yield from (value for name, value in vars(module).items() if name not in _OF_MODULES)
    for kind in type(module).__mro__:
        if not _is_of_torch(kind) and kind is not object:
            for name, value in vars(kind).items():
                value = getattr(value, "fget", getattr(value, "__func__", value))
                if name != "__init__" if isinstance(value, types.FunctionType) else not name.startswith("__"):
                    yield value


def _may_draw(thing: Any) -> bool:
    """Whether a value holds code that may draw: it is no plain value, nor a function that names only torch's and pipetrain's code."""
    if isinstance(thing, (list, tuple, dict)):
        return any(map(_may_draw, thing.values() if isinstance(thing, dict) else thing))
    if thing is None or isinstance(thing, (int, float, str, Tensor)) or _is_of_torch(thing):
        return False
    if not isinstance(thing, types.FunctionType) or thing.__closure__:
        return True
    has_drawing_defaults = _may_draw(thing.__defaults__) or _may_draw(thing.__kwdefaults__)
    return has_drawing_defaults or _names_more(thing.__code__, thing.__globals__)


def _names_more(code: types.CodeType, names: Mapping[str, Any]) -> bool:
    """Whether a function imports anything, runs code from text, or names a global that is neither torch's nor pipetrain's."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return (
        any(name in _DYNAMIC or not _is_of_torch(names.get(name, torch)) for name in code.co_names)
        or any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(code))
        or any(_names_more(part, names) for part in inner)
    )


def _is_of_torch(thing: Any) -> bool:
    name = getattr(thing, "__name__" if isinstance(thing, types.ModuleType) else "__module__", None) or ""
    return name.partition(".")[0] in _DRAW_FROM_TORCH


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Restore the default generators of torch, Python and numpy after the block."""
    python = random.getstate()
    numpy_random = sys.modules.get(_NUMPY)
    numpy = None if numpy_random is None else numpy_random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy_random is not None:
                numpy_random.set_state(numpy)
