"""A model of six layers with its batches, and pipelines of several replicas that train it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ranks import NEVER_SECONDS
from torch import Tensor, nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import RecomputePolicy

WIDTH, MICROBATCHES = 8, 4


class Block(nn.Module):
    """With a weight that is too large to travel with others, where `wide`."""

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        hidden = (1 << 15) + 8 if wide else 12
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.dropout(self.down(torch.tanh(self.up(self.norm(value)))))


def layers(*, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(WIDTH, WIDTH), Block(wide=True), *(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch(step: int, rows: int = 33) -> tuple[Tensor, Tensor]:
    """By default a number of rows that neither replicas nor microbatches divide."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return inputs, targets


def difference(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@dataclass(frozen=True)
class Shape:
    """Ranks and replicas; and what plan and pipeline are given besides."""

    num_ranks: int
    num_replicas: int
    plan: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def pipeline(self, model: Any = None, loss: Any = mean_square, **more: Any) -> Pipeline:
        plan = make_plan(6, num_ranks=self.num_ranks // self.num_replicas, num_microbatches=MICROBATCHES, **self.plan)
        options = {"plan": plan, "num_replicas": self.num_replicas, "timeout_seconds": NEVER_SECONDS, **self.options}
        return Pipeline(layers() if model is None else model, loss, **{**options, **more})


SHAPES = {
    "2 x 2": Shape(4, 2),
    "2 x 2, 1f1b in parts": Shape(4, 2, options={"schedule": "1f1b", "recompute": RecomputePolicy(segments="layers")}),
    "2 x 2, split, neighbours": Shape(
        4, 2, {"split_backward": True, "order": "stage-replica"}, {"schedule": "1f1b", "recompute": "inline"}
    ),
    "4 x 1": Shape(4, 4, options={"recompute": "early"}),
    "3 x 2, interleaved": Shape(6, 3, {"stages_per_rank": 2}, {"schedule": "interleaved"}),
    "2 x 3, auto": Shape(6, 2, options={"schedule": "auto"}),
}


def assert_replicas_equal(pipeline: Pipeline) -> None:
    pipeline.check_replicas()
    group = pipeline.replica_process_group()
    for name, parameter in pipeline.named_parameters() if group is not None else ():
        replicas = [torch.empty_like(parameter) for _ in range(pipeline.num_replicas)]
        dist.all_gather(replicas, parameter.detach(), group=group)
        assert all(torch.equal(one, replicas[0]) for one in replicas), name
