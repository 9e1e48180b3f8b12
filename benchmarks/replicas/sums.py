"""Systems that run several replicas of a pipeline and add up their gradients, over links of a chosen speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.schedule.op import Op
from pipetrain.schedule.schedule import Schedule

from ..emulated import occupy_link, slow_sums
from ..systems import Ours, OursRunner, TorchPipelining, TorchRunner, Workload


@dataclass(frozen=True)
class Sums:
    """What adding up takes: seconds for all gradients of each rank of a replica, over `num_replicas`. One replica adds nothing up."""

    num_replicas: int
    seconds: tuple[float, ...] = ()


def start(system: Ours | TorchPipelining, workload: Workload, sums: Sums) -> OursRunner | TorchRunner:
    """The system on this rank; with one replica as it is."""
    if isinstance(system, Ours):
        if sums.num_replicas > 1:
            schedule = system.schedule(workload)
            slow_sums(lambda op: seconds_of(op, schedule, sums))
        return OursRunner(system, workload, num_replicas=sums.num_replicas)
    if sums.num_replicas == 1:
        return TorchRunner(system, workload)
    return _TorchWithSums(system, workload, sums)


def seconds_of(op: Op, schedule: Schedule, sums: Sums) -> float:
    """Of a bucket of a rank: what it has of all layers there."""
    rank = schedule.stage_ranks[op.stage]
    stages = schedule.stage_ranks.count(rank)
    part = op.part if schedule.policy.num_parts(op.stage) > 1 else None
    return sums.seconds[rank] / stages * schedule.policy.share_of(op.stage, part)


class _TorchWithSums(TorchRunner):
    """torch's schedule, and then one all-reduce of all gradients: its page on pipelines says to add data parallelism like that."""

    def __init__(self, system: TorchPipelining, workload: Workload, sums: Sums) -> None:
        place = dist.get_rank() % workload.num_stages
        super().__init__(
            system,
            workload,
            group=_own(
                [[r * workload.num_stages + s for s in range(workload.num_stages)] for r in range(sums.num_replicas)]
            ),
        )
        self._replicas = _own(
            [[r * workload.num_stages + s for r in range(sums.num_replicas)] for s in range(workload.num_stages)]
        )
        self._seconds = sums.seconds[place]

    def step(self) -> None:
        super().step()
        gradients = self.gradients()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._replicas)
        occupy_link(self._seconds)
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(total.view_as(gradient))


def _own(groups: Sequence[Sequence[int]]) -> Any:
    """The group that this rank is in. Every rank makes them all."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next(group for ranks, group in made if dist.get_rank() in ranks)
