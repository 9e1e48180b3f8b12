"""The links between stages, measured by messages of two sizes both ways at once: `torchrun -m pipetrain.trainer.links FILE` on a rank per stage."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from pipetrain.monitor.residuals import measure_costs
from pipetrain.plan.profile import Link
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.costs import Costs

_SMALL, _LARGE = 1 << 10, 1 << 22  # bytes of a message
_MICROBATCHES, _STEPS = 8, 4
_LEAST_SECONDS = 1e-7  # what clocks tell apart
_MOST_SECONDS = 60.0  # that a rank waits for another
_NUMBER_BYTES = 4


class _Pass(nn.Module):
    """Gives what it gets, times a weight: its F and B take little beside the message."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, given: Tensor) -> Tensor:
        return given * self.weight


def _mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def measure_links(num_stages: int) -> list[Link] | None:
    """The link behind each stage but the last, on rank 0; None on the others. Collective, over so many stages.

    1F1B has an activation and a gradient on each link at once. A hop lasts from when both ends are ready to the arrival.
    """
    layers, balance = [_Pass() for _ in range(num_stages)], [1] * num_stages
    with Pipeline(
        layers,
        _mean,
        num_microbatches=_MICROBATCHES,
        schedule="1f1b",
        recompute="never",
        balance=balance,
        timeout_seconds=_MOST_SECONDS,
    ) as pipeline:
        of_small, of_large = _hops(pipeline, _SMALL), _hops(pipeline, _LARGE)
    links = []
    for small, large in zip(of_small, of_large):
        per_byte = max(large - small, _LEAST_SECONDS) / (_LARGE - _SMALL)
        links.append(Link(max(0.0, small - _SMALL * per_byte), 1 / per_byte))
    return links or None


def _hops(pipeline: Pipeline, size: int) -> list[float]:
    """Seconds of a message of so many bytes over each link, the mean of both directions; on rank 0, on the others nothing."""
    batch, steps = torch.zeros(_MICROBATCHES, size // _NUMBER_BYTES), []
    for step in range(1 + _STEPS):
        pipeline.step(batch, batch)
        report = pipeline.gather_report()
        if step and report is not None:  # the first announces shapes
            steps.append(report.timelines)
    return _both_ways(measure_costs(pipeline.plan.num_stages, steps)) if steps else []


def _both_ways(costs: Costs) -> list[float]:
    return [statistics.fmean(pair) for pair in zip(costs.hop_forward, costs.hop_backward)]


def main(arguments: Sequence[str]) -> None:
    """Rank 0 writes the links to the file."""
    links = measure_links(int(os.environ["WORLD_SIZE"]))
    if links is not None:
        Path(arguments[0]).write_text(json.dumps([asdict(link) for link in links]))


if __name__ == "__main__":
    main(sys.argv[1:])
