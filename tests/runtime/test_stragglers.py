"""A rank whose layer becomes slow in the middle of a real run is named from the op times that it measured."""

from __future__ import annotations

import time
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.timeline.stragglers import StragglerWatch

SLOW_FROM = 16
STEPS = 30


class Tired(nn.Module):
    """Takes 15 ms, and 45 ms from step `SLOW_FROM` on; its clock is the count of steps that the test sets."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.becomes_slow = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.045 if self.becomes_slow and Tired.step >= SLOW_FROM else 0.015)
        return self.linear(x)


def trained() -> tuple[Any, ...]:
    torch.manual_seed(0)
    layers = [Tired() for _ in range(3)]
    layers[1].becomes_slow = True
    watch = StragglerWatch({})
    with Pipeline(layers, nn.functional.mse_loss, num_microbatches=2, recompute="inline") as pipeline:
        for Tired.step in range(1, STEPS + 1):
            pipeline.step(torch.ones(4, 8), torch.zeros(4, 8))
            report = pipeline.gather_report()
            if report is not None:
                watch.add(Tired.step, report.timeline)
    return tuple((one.rank, one.kind, one.ratio, one.since_step) for one in watch.stragglers())


def test_the_slow_rank_is_named() -> None:
    found, *others = run_ranks(3, trained)
    assert others == [()] * 2
    by_op = {(rank, kind): (ratio, since) for rank, kind, ratio, since in found}
    for kind in ("F", "R"):  # B does not run the layer's forward
        ratio, since = by_op[1, kind]
        assert 2.0 < ratio < 4.5
        assert SLOW_FROM <= since <= SLOW_FROM + 2
    assert {rank for rank, kind in by_op if kind != "B"} == {1}
