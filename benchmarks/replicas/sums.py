"""Systems that run several replicas of a pipeline and add up their gradients, over links of a chosen speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """What adding up takes: seconds for all gradients of each rank of a replica, over `num_replicas`."""

    num_replicas: int
    seconds: tuple[float, ...] = ()


def seconds_of(op: Op, schedule: Schedule, sums: Sums) -> float:
    """Of a bucket of a rank: what it has of all layers there."""
    rank = schedule.stage_ranks[op.stage]
    stages = schedule.stage_ranks.count(rank)
    part = op.part if schedule.policy.num_parts(op.stage) > 1 else None
    return sums.seconds[rank] / stages * schedule.policy.share_of(op.stage, part)


class Links:
    """How slow the links are between the replicas of this rank, for the runners that stand on it."""

    def __init__(self) -> None:
        self._seconds_of: Callable[[Op], float] = lambda op: 0.0  # noqa: ARG005
        slow_sums(lambda op: self._seconds_of(op))

    def slow(self, seconds_of: Callable[[Op], float]) -> None:
        """From the next step on."""
        self._seconds_of = seconds_of


class TorchWithSums(TorchRunner):
    """torch's schedule on the ranks of `replica`, and then one all-reduce of all gradients over those of `replicas`: its page on pipelines
    says to add data parallelism like that. The reduce takes so many seconds more than gloo's own time."""

    def __init__(
        self,
        system: TorchPipelining,
        workload: Workload,
        seconds: float,
        replica: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
    ) -> None:
        super().__init__(system, workload, group=replica)
        self._seconds, self._replicas = seconds, replicas

    def step(self) -> None:
        super().step()
        gradients = self.gradients()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._replicas)
        occupy_link(self._seconds)
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(total.view_as(gradient))


class OursWithSums:
    """A system of ours on this rank: as a pipeline that adds nothing up, and as one of several replicas."""

    def __init__(
        self, system: Ours, workload: Workload, num_replicas: int, replica: dist.ProcessGroup, links: Links
    ) -> None:
        self.alone = OursRunner(system, workload, group=replica)
        self._summed = OursRunner(system, workload, num_replicas=num_replicas)
        self._schedule = self._summed.pipeline.schedule
        self._links = links

    def step(self, sums: Sums) -> None:
        """One in which the buckets take what `sums` says."""
        self._links.slow(lambda op: seconds_of(op, self._schedule, sums))
        self._summed.step()

    def close(self) -> None:
        self.alone.close()
        self._summed.close()


def own_group(groups: Sequence[Sequence[int]]) -> Any:
    """The group that this rank is in. Every rank makes them all."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next(group for ranks, group in made if dist.get_rank() in ranks)
