"""Which layers make the host wait for its device: seen in the first step on one that runs ahead, and told in a line each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch import nn

from pipetrain.comm.device import Device
from pipetrain.stage.segments import AnyStage

_OURS = tuple(str(Path(__file__).parents[1] / room) for room in ("stage", "runtime", "transport"))


@contextmanager
def waits_told(stages: Mapping[int, AnyStage], device: Device) -> Iterator[None]:
    """Within it, each wait of the host for the device is looked at; afterwards there is a warning for each layer that had one.

    Whose forward it is stands on the stack of who waits. What pipetrain itself waits for on a first microbatch, to compare,
    does not count.
    """
    layers = {
        id(layer): f"layer {number} ({type(layer).__name__}) of stage {index}"
        for index, stage in stages.items()
        for number, layer in stage.layers_by_number().items()
    }
    found: dict[str, str] = {}  # layer -> the first place where it waits

    def on_wait(file: str, line: int) -> None:
        layer = None if file.startswith(_OURS) else _layer_on(sys._getframe(1), layers)
        if layer is not None:
            found.setdefault(layer, f"{file}:{line}")

    with device.watch_waits(on_wait):
        yield
    for layer, place in found.items():
        warnings.warn(
            f"{layer} makes the host wait for the GPU in every microbatch ({place}), so that what should run beside it is launched too "
            "late: do without .item(), .nonzero(), .tolist() and `if` on a tensor in its forward, or keep what they need on the CPU",
            stacklevel=4,
        )


def _layer_on(frame: FrameType | None, layers: Mapping[int, str]) -> str | None:
    """The layer whose forward this is called in."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in layers:
            return layers[id(module)]
        frame = frame.f_back
    return None
