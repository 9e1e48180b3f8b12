"""Random numbers that do not depend on the split: each layer starts from a seed of its own for each microbatch.

The same seed is set in F and again in R, so a dropout mask need not be stashed, and a model cut into four stages draws
the masks of the model in one piece.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_NUMPY = "numpy.random"
_DRAW_FROM_TORCH = frozenset({"torch", "pipetrain"})
_MASK = (1 << 64) - 1


def mix(*numbers: int, state: int = 0) -> int:
    """One 64-bit seed from several integers, each of which changes all bits (SplitMix64, Steele et al. 2014, figure 15).

    `state` is that of integers before these.
    """
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def layer_seeds(seed: int, step: int, microbatch: int, layers: Sequence[int]) -> list[int]:
    """The seeds of some layers for one microbatch; `microbatch` counts over all replicas, `layers` over the whole model."""
    before = mix(seed, step, microbatch)
    return [mix(layer, state=before) for layer in layers]


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of one layer, as `layer_seeds`."""
    return mix(seed, step, microbatch, layer)


def weight_seed(seed: int, layer: int) -> int:
    """The seed from which the weights of a layer are drawn when a rank builds it."""
    return mix(seed, layer)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The default generators that a layer on `device` draws from."""
    own = [torch.default_generator]
    return own if device.type != "cuda" else [*own, torch.cuda.default_generators[device.index or 0]]


def seed_generators(seed: int, device: torch.device) -> None:
    """Set the default generators that a layer on `device` draws from, and those of Python.

    Not `torch.manual_seed`, which seeds every back-end of the machine: this runs once per layer and microbatch.
    """
    for generator in generators_of(device):
        generator.manual_seed(seed)
    seed_python(seed)


def seeder(device: torch.device, *, in_python: bool) -> Callable[[int], object]:
    """What sets the generators of a layer on `device` to a seed; those of Python too where it may draw from them."""
    generators = generators_of(device)
    if not in_python and len(generators) == 1:
        return generators[0].manual_seed

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)
        if in_python:
            seed_python(number)

    return seed


def seed_python(seed: int) -> None:
    """Set the generators of Python and, where it is loaded, of numpy: ten times the work of torch's, for a layer that may draw from them."""
    random.seed(seed)
    numpy_random = sys.modules.get(_NUMPY)
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)


def draws_in_python(layer: Any) -> bool:
    """Whether a layer, or a loss, may draw from the generators of Python and numpy: what is made of torch alone does not."""
    if isinstance(layer, nn.Module):
        return any(_may_draw(type(module)) or _has_hooks(module) for module in layer.modules())
    return _may_draw(layer)


def _may_draw(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or ""
    return module.partition(".")[0] not in _DRAW_FROM_TORCH


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Give the user's generators back as they were."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python = random.getstate()
    numpy_random = sys.modules.get(_NUMPY)
    numpy = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        random.setstate(python)
        if numpy_random is not None:
            numpy_random.set_state(numpy)
