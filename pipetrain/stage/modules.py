"""Modules and parameters below some layers, as `nn.Module` lists them, in a tenth of its time: every step asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def modules_below(roots: Iterable[Any]) -> list[nn.Module]:
    """Every module once, in the order of `nn.Module.modules`; of what is no module, none."""
    found: dict[nn.Module, None] = {}
    waiting = [root for root in roots if isinstance(root, nn.Module)][::-1]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(reversed(module._modules.values()))  # type: ignore[arg-type]
    return list(found)


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Every parameter of these modules once, in the order of `nn.Module.parameters`."""
    filled = [module._parameters for module in modules if module._parameters]
    found = {id(parameter): parameter for own in filled for parameter in own.values() if parameter is not None}
    return list(found.values())


def buffers_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Every buffer of these modules once."""
    filled = [module._buffers for module in modules if module._buffers]
    found = {id(buffer): buffer for own in filled for buffer in own.values() if buffer is not None}
    return list(found.values())
