"""A rank whose layer becomes slow in the middle of a real run is named from the op times that it measured.

The clock that its lanes read is moved by the layers themselves: what an op takes does not depend on the machine.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from pipetrain.comm.device import CpuDevice
from pipetrain.comm.lanes import Lanes
from pipetrain.monitor.stragglers import StragglerWatch
from pipetrain.runtime import pipeline as runtime
from pipetrain.runtime.pipeline import Pipeline

SLOW_FROM = 16
STEPS = 30


class Clock:
    """Goes on by a millisecond whenever it is read, and by what the layers take. No state of a layer, which R would put back."""

    def __init__(self) -> None:
        self._seconds = ctypes.c_double()

    def go_on(self, seconds: float) -> None:
        self._seconds.value += seconds

    def __call__(self) -> float:
        self.go_on(0.001)
        return self._seconds.value


class Timed(CpuDevice):
    """A device whose events happen when `clock` says."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self, stream: object, again: object = None) -> float:  # noqa: ARG002
        return self._clock()


class Tired(nn.Module):
    """Takes 15 ms, and 45 ms from step `SLOW_FROM` on; it counts the steps as the test sets them."""

    step = 0

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.clock = clock
        self.becomes_slow = False

    def forward(self, x: Tensor) -> Tensor:
        self.clock.go_on(0.045 if self.becomes_slow and Tired.step >= SLOW_FROM else 0.015)
        return self.linear(x)


def trained() -> tuple[Any, ...]:
    torch.manual_seed(0)
    clock = Clock()
    runtime.make_lanes = lambda rank, device: Lanes(rank, Timed(clock))  # type: ignore[assignment]
    layers = [Tired(clock) for _ in range(3)]
    layers[1].becomes_slow = True
    watch = StragglerWatch({})
    with Pipeline(layers, nn.functional.mse_loss, num_microbatches=2, recompute="inline") as pipeline:
        for Tired.step in range(1, STEPS + 1):
            pipeline.step(torch.ones(4, 8), torch.zeros(4, 8))
            report = pipeline.gather_report()
            if report is not None:
                watch.add(Tired.step, report.timeline)
    return tuple((one.rank, one.kind, one.ratio, one.since_step) for one in watch.stragglers())


@pytest.mark.slow
def test_the_slow_rank_is_named() -> None:
    found, *others = run_ranks(3, trained)
    assert others == [()] * 2
    assert [(rank, kind, since) for rank, kind, _, since in found] == [(1, "F", SLOW_FROM), (1, "R", SLOW_FROM)]
    assert [ratio for _, _, ratio, _ in found] == pytest.approx([46 / 16] * 2)  # B does not run the layer's forward
