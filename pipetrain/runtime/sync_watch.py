"""Which layers make the host wait for its device: seen in the first step on one that runs ahead, and told in a line each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from pipetrain.stage.stage import Stage
from pipetrain.transport.device import Device

# How torch begins to say so, in its mode of debugging synchronisation (torch.cuda.set_sync_debug_mode).
_TOLD = "called a synchronizing"
_OURS = str(Path(__file__).parents[1])


@contextmanager
def waits_told(stages: Mapping[int, Stage], device: Device) -> Iterator[None]:
    """Within it, each wait for the device is looked at; afterwards there is a warning for each layer that had one.

    torch warns where it waits, on the thread that does: so whose forward it is stands on the stack. What pipetrain itself waits
    for on a first microbatch, to compare, does not count.
    """
    layers = {
        id(layer): f"layer {number} ({type(layer).__name__}) of stage {index}"
        for index, stage in stages.items()
        for number, layer in stage.layers_by_number().items()
    }
    found: dict[str, str] = {}  # layer -> the first place where it waits

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_TOLD)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not see all of them
        show = warnings.showwarning

        def look(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if not str(message).startswith(_TOLD):
                show(message, category, filename, lineno, *rest)
            elif not filename.startswith(_OURS) and (layer := _layer_on(sys._getframe(1), layers)):
                found.setdefault(layer, f"{filename}:{lineno}")

        warnings.showwarning = look
        with device.tells_waits():
            yield
    for layer, place in found.items():
        warnings.warn(
            f"{layer} makes the host wait for the GPU in every microbatch ({place}), so that what should run beside it is launched too "
            "late: do without .item(), .nonzero(), .tolist() and `if` on a tensor in its forward, or keep what they need on the CPU",
            stacklevel=3,
        )


def _layer_on(frame: FrameType | None, layers: Mapping[int, str]) -> str | None:
    """The layer whose forward this is called in."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in layers:
            return layers[id(module)]
        frame = frame.f_back
    return None
