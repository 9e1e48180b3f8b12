"""Checks the arguments of `Pipeline` and of its calls. Each error names the argument, its value and what is allowed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from torch import nn

from pipetrain.plan.plan import Plan
from pipetrain.runtime.cut import is_number
from pipetrain.stage.leaves import first_named

_LONGEST_TIMEOUT_SECONDS = 1e9  # some thirty years; threads cannot wait for much longer
MEAN, SUM = "mean", "sum"  # values of loss_reduction
_SEEDS = range(-(1 << 63), 1 << 64)  # those that torch.manual_seed takes


def checked_timeout(seconds: Any) -> float:
    """Return the timeout as a float. Raises ValueError: `seconds` is not a number, not more than 0, or more than 1e9."""
    if not is_number(seconds) or not 0 < seconds <= _LONGEST_TIMEOUT_SECONDS:
        raise ValueError(
            f"timeout_seconds={seconds!r}: the longest wait for another rank, a number of seconds more than 0 and at most 1e9"
        )
    return float(seconds)


def checked_seed(seed: Any) -> int:
    """Return the seed as an int. Raises ValueError: it is not a whole number of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or int(seed) not in _SEEDS:
        raise ValueError(f"seed={seed!r}: a whole number of 64 bits is needed, such as 0")
    return int(seed)


def check_functions(loss_fn: Any, count_fn: Any, on_event: Any, on_call: Any, layers: Iterable[Any]) -> None:
    """Refuse an argument that cannot be called, and a loss with trainable parameters that are in no layer: the pipeline would neither list,
    save nor clip them. Raises ValueError, which names the argument or the parameters."""
    takes = {
        "loss_fn": (loss_fn, "an output and its target"),
        "count_fn": (count_fn, "a microbatch's target"),
        "on_event": (on_event, "an OpEvent"),
        "on_call": (on_call, "an op and its stage's layers"),
    }
    for name, (function, what) in takes.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name}={function!r}: give a function of {what}, or leave {name} out")
    of_layers = {id(parameter) for layer in layers if isinstance(layer, nn.Module) for parameter in layer.parameters()}
    named = (pair for module in _modules_of(loss_fn) for pair in module.named_parameters())
    own = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in of_layers]
    if own:
        rest = f" and {len(own) - 2} more" if len(own) > 2 else ""
        raise ValueError(
            f"loss_fn has parameters of its own to train ({', '.join(own[:2])}{rest}), which the pipeline would neither clip, "
            "update nor save: make the module that has them the last layer, or freeze them with requires_grad_(False)"
        )


def checked_reduction(reduction: Any) -> str:
    """Return `reduction`. Raises ValueError: it is neither `mean` nor `sum`."""
    if reduction not in (MEAN, SUM):
        raise ValueError(
            f"loss_reduction={reduction!r}: allowed are 'mean' (loss_fn is a mean over rows, or over what count_fn counts) and 'sum'"
        )
    return str(reduction)


def check_loss_is_local(loss_fn: Any, layers: Mapping[int, nn.Module], plan: Plan) -> None:
    """Refuse a loss that reads layers of another rank, because attributes that their forward sets exist on that rank only. `layers` are the
    layers that this rank knows: all, or only its own if callables make the layers. Raises ValueError, which names one such layer."""
    is_near = {number: plan.stage_ranks[plan.stage_of(number)] == plan.stage_ranks[-1] for number in layers}
    near = {module for number, layer in layers.items() if is_near[number] for module in layer.modules()}
    far: dict[nn.Module, int] = {}
    for number, layer in layers.items():
        for module in layer.modules():
            if module not in near:
                far.setdefault(module, number)
    found = first_named(loss_fn, lambda thing: isinstance(thing, nn.Module) and thing in far, near) if far else None
    if found is not None:
        path, module = found
        number = far[module]
        raise ValueError(
            f"loss_fn reads {path}, and layer {number} ({type(layers[number]).__name__}) is of stage {plan.stage_of(number)} on another rank, "
            "so that loss_fn would not see attributes that its forward sets: call pipetrain.add_loss(...) in that forward, or return the "
            "value as part of its output. If loss_fn needs layers of the last stage, give it only those"
        )


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """Yield the modules of a loss: the loss itself, the owner of a method, or those in a `functools.partial`."""
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, functools.partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(part)
    elif (owner := getattr(function, "__self__", None)) is not None:
        yield from _modules_of(owner)
