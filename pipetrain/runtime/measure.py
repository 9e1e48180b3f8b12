"""Makes one rank's report of a step, and names the layers that made the host wait for its device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from pipetrain.comm.clocks import Clock
from pipetrain.comm.device import Device, DeviceMemory
from pipetrain.comm.lanes import Recording
from pipetrain.monitor.step_report import RankReport
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.kinds import Holding
from pipetrain.stage.segments import AnyStage

_OURS = tuple(str(Path(__file__).parents[1] / room) for room in ("stage", "runtime", "comm"))


def measure_rank(
    recording: Recording, clock: Clock, stages: Mapping[int, AnyStage], memory: DeviceMemory, **known: Any
) -> RankReport:
    """Return the report of a step; `known` are further fields of `RankReport`. On a GPU this waits for the step to end there."""
    shift = clock.offset_seconds
    on_clock_0 = tuple(replace(event, start=event.start + shift, end=event.end + shift) for event in recording.events())
    return RankReport(
        **known,
        events=on_clock_0,
        peak_activation_bytes_never=activation_bytes_of_never(on_clock_0, stages),
        peak_memory_bytes=memory.peak_bytes,
        clock_error_seconds=clock.error_seconds + recording.error_seconds(),
        peak_reserved_bytes=memory.peak_reserved_bytes,
        set_bytes=_most(stage.set_bytes for stage in stages.values()),
        input_bytes=_most(stage.stash_bytes for stage in stages.values()),
        kept_bytes=_most(stage.kept_bytes for stage in stages.values()),
        limit_bytes=memory.limit_bytes,
        stages=tuple(sorted(stages)),
    )


def _most(sizes: Iterable[Mapping[int, int]]) -> int:
    """The largest size over all microbatches of all stages."""
    return max((size for of_stage in sizes for size in of_stage.values()), default=0)


def activation_bytes_of_never(events: Iterable[OpEvent], stages: Mapping[int, AnyStage]) -> int:
    """Return the bytes that the rank would hold at its peak if every set stayed from F to B, with F and B in the order in which they ran.
    The figure is computed from the bytes of each set, which F or R filled, and of each stashed input."""
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start):
        op = event.op
        row = op.kind.row
        change = (Holding.STASH in row.allocates) - (Holding.STASH in row.frees and not op.part)
        if not change or op.stage not in stages:
            continue
        stage = stages[op.stage]
        size = stage.set_bytes.get(op.microbatch or 0, 0) + stage.stash_bytes.get(op.microbatch or 0, 0)
        alive += change * size
        peak = max(peak, alive)
    return peak


@contextmanager
def waits_told(stages: Mapping[int, AnyStage], device: Device) -> Iterator[None]:
    """Note each wait of the host for the device in the block, and the layer on the stack that caused it. At the end, warn of each such
    layer. Waits in pipetrain's own code do not count: it waits when it compares F and R of the first microbatch."""
    layers = {
        id(layer): f"layer {number} ({type(layer).__name__}) of stage {index}"
        for index, stage in stages.items()
        for number, layer in enumerate(stage.layers, stage.first_layer)
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
            f"{layer} makes the host wait for the GPU in every microbatch ({place}), so that ops that should run beside it are launched "
            "too late: do without .item(), .nonzero(), .tolist() and `if` on a tensor in its forward, or keep their tensors on the CPU",
            stacklevel=4,
        )


def _layer_on(frame: FrameType | None, layers: Mapping[int, str]) -> str | None:
    """The innermost layer whose forward is on the stack of `frame`."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in layers:
            return layers[id(module)]
        frame = frame.f_back
    return None
