"""Ranks in one process: the real executor, transport and stages, over wires that deliver late and in any legal order.

`InProcessRun` is all ranks of a schedule; what their wires promise stands in `wires.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rounding import rounding
from torch import Tensor, nn
from wires import Choose, Edges, Log, Meeting, Theatre

from pipetrain.comm.crossing import cross
from pipetrain.comm.device import CpuDevice, Event
from pipetrain.comm.failure import FailureBoard, Monitor
from pipetrain.comm.forms import Form
from pipetrain.comm.lanes import Lanes
from pipetrain.comm.transport import Transport
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.gradients import SharedGradients
from pipetrain.runtime.program import COMPUTING, Program
from pipetrain.schedule.kinds import MESSAGE_LANES
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.seeding import generators_restored
from pipetrain.stage.segments import AnyStage, make_stage, parameters_of_parts

CPU = torch.device("cpu")
WIDTH = 3


class _Lanes(Lanes):
    """Says when each op starts, and when one that computes ends; others may go on before each."""

    def __init__(self, rank: int, theatre: Theatre, log: Log) -> None:
        super().__init__(rank, CpuDevice())
        self._own = rank
        self._theatre = theatre
        self._log = log

    @contextmanager
    def on(self, lane: Lane, waits: Sequence[Op], op: Op) -> Iterator[None]:
        self._theatre.pause(self._own, lambda: True, lambda: str(op))
        self._log.append(("start", op))
        with super().on(lane, waits, op):
            yield
        if lane in COMPUTING:
            self._log.append(("end", op))

    def mark(self, lane: Lane, op: Op) -> Event:
        """Of an op that does nothing, as its microbatch counts nothing."""
        if lane not in COMPUTING:
            self._log.append(("end", op))
        return super().mark(lane, op)


class _Monitor(Monitor):
    def __init__(self, rank: int, theatre: Theatre) -> None:
        super().__init__(rank, FailureBoard(None), timeout_seconds=1.0)
        self._theatre = theatre

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        self._theatre.pause(self.rank, ready, what)


class InProcessRun:
    """All ranks of a schedule, in each of its replicas, on stages of one layer each; those below `first_backward` are frozen.

    `layers` are those of the first replica; `replicas` has those of each.
    """

    def __init__(
        self, schedule: Schedule, choose: Choose, *, buffered: bool = False, skipped: Sequence[frozenset[int]] = ()
    ) -> None:
        """`skipped` are the microbatches that count nothing, in each replica."""
        self.schedule = schedule
        self.skipped = list(skipped) or [frozenset[int]()] * schedule.num_replicas
        self.theatre = Theatre(choose)
        torch.manual_seed(0)
        self.layers = [Layer() for _ in schedule.stage_ranks]
        for layer in self.layers[: schedule.first_backward]:
            layer.requires_grad_(False)
        self._tie()
        self.replicas = [self.layers, *(copy.deepcopy(self.layers) for _ in range(schedule.num_replicas - 1))]
        self.logs: list[Log] = [[] for _ in self.replicas]
        m = schedule.num_microbatches * schedule.num_replicas
        self.inputs = torch.randn(m, 2, WIDTH, dtype=torch.float64)
        self.targets = torch.randn(m, 2, WIDTH, dtype=torch.float64)
        self.outputs: dict[int, Tensor] = {}
        self._num_steps = 0
        self._programs = [Program.of(schedule, place) for place in range(schedule.num_ranks)]
        self._forms: list[dict[Op, Form]] = [{} for _ in range(schedule.num_ranks * schedule.num_replicas)]
        meetings: dict[tuple[int, ...], Meeting] = {}
        edges = [Edges(self.theatre, buffered, log, meetings) for log in self.logs]
        self.transports: list[Transport] = []
        self.stages: list[dict[int, AnyStage]] = []
        self.shared: list[SharedGradients] = []
        self.executors = [
            self._make_executor(replica, place, edges[replica])
            for replica in range(schedule.num_replicas)
            for place in range(schedule.num_ranks)
        ]

    def _make_executor(self, replica: int, place: int, edges: Edges) -> Executor:
        rank = replica * self.schedule.num_ranks + place
        meter, monitor, policy = ActivationMeter(), _Monitor(rank, self.theatre), self.schedule.policy
        lanes, layers = _Lanes(rank, self.theatre, self.logs[replica]), self.replicas[replica]
        ranks = [
            [number * self.schedule.num_ranks + holder for holder in self.schedule.stage_ranks]
            for number in range(self.schedule.num_replicas)
        ]
        transport = Transport(ranks[replica], rank, edges, meter, CPU, lanes, self.schedule.tied, ranks)
        stages = {
            index: make_stage(
                index,
                [layers[index], *(nn.Identity() for _ in range(policy.num_parts(index) - 1))],
                (1,) * policy.num_parts(index),
                first_layer=index,
                cross=cross,
                device=CPU,
                meter=meter,
                loss_fn=mean_square if index == self.schedule.num_stages - 1 else None,
            )
            for index, owner in enumerate(self.schedule.stage_ranks)
            if owner == place
        }
        self.transports.append(transport)
        self.stages.append(stages)
        reduces = [op for op in self.schedule.lane(place, Lane.REDUCE) if op.peer is not None]
        shared = SharedGradients(
            {op: [layers[op.stage].shared[str(op.part)]] for op in reduces},
            {
                (index, part): parameters
                for index, stage in stages.items()
                for part, parameters in enumerate(parameters_of_parts(stage))
            },
        )
        self.shared.append(shared)
        return Executor(rank, stages, transport, lanes, monitor, monitor.board, shared)

    def _tie(self) -> None:
        """Each pair of stages that shares a parameter gets a factor: one on a rank, two copies on two."""
        ranks = self.schedule.stage_ranks
        for bucket, (low, high) in enumerate(self.schedule.tied):
            copies = [nn.Parameter(torch.tensor(1.5, dtype=torch.float64)) for _ in range(2)]
            if ranks[low] == ranks[high]:
                copies[1] = copies[0]
            for stage, one in zip((low, high), copies):
                one.requires_grad_(low >= self.schedule.first_backward)
                self.layers[stage].shared[str(bucket)] = one

    def step(self) -> list[Log]:
        """One step of all ranks; gradients are those of this step alone. Returns what happened in each replica.

        Raises:
            Hang, or what a rank raises.
        """
        for log, layers in zip(self.logs, self.replicas):
            log.clear()
            for layer in layers:
                layer.zero_grad()
        with generators_restored(CPU):
            self.theatre.play([lambda rank=rank: self._run(rank) for rank in range(len(self.executors))])  # type: ignore[misc]
        self._num_steps += 1
        return [list(log) for log in self.logs]

    def _run(self, rank: int) -> None:
        replica, place = divmod(rank, self.schedule.num_ranks)
        m = self.schedule.num_microbatches
        own = slice(replica * m, (replica + 1) * m)
        with_graph = self.schedule.first_backward < self.schedule.num_stages
        step = Step(self._num_steps, 0, with_graph=with_graph, with_loss=True)
        step.microbatches, step.targets = list(self.inputs[own]), list(self.targets[own])
        step.weights, step.first_microbatch = [1 / len(self.inputs)] * m, own.start
        step.idle = self.skipped[replica]
        described = self._num_steps == 0
        self.transports[rank].start_step(self._forms[rank], described=(described, described))
        self.executors[rank].run(self._programs[place], step)
        self.shared[rank].finish(lambda tensor, what: tensor)
        self.outputs.update({own.start + number: output for number, output in step.outputs.items()})

    def assert_right(self, logs: Sequence[Log]) -> None:
        """Every op obeyed its waits and its queue, and every value is that of a plain loop over the microbatches."""
        for log in logs:
            assert_obeyed(self.schedule, log)
        found = [self._gradients(layers) for layers in self.replicas]
        for layer in self.layers:
            layer.zero_grad()
        m = len(self.inputs)
        # A microbatch's share is a factor in the executor and a divisor here: two roundings.
        share = rounding(torch.float64, terms=2)
        # Microbatches are added up in another order; each gradient has crossed a sum over the width in every layer.
        close = rounding(torch.float64, terms=m * len(self.layers) * WIDTH)
        starts = range(0, m, self.schedule.num_microbatches)
        for number in (
            start + one for start, idle in zip(starts, self.skipped) for one in range(starts.step) if one not in idle
        ):
            value = self.inputs[number]
            for layer in self.layers:
                value = layer(value)
            loss = mean_square(value, self.targets[number]) / m
            torch.testing.assert_close(self.outputs[number], loss.detach(), rtol=share, atol=0)
            if loss.requires_grad:
                loss.backward()
        self._add_up_copies()
        expected = self._gradients(self.layers)
        for one, other in (
            (one, other) for of_replica in found for one, other in zip(of_replica, expected, strict=True)
        ):
            if other is None:
                assert one is None
            else:
                torch.testing.assert_close(one, other, rtol=close, atol=1e-12)

    def _gradients(self, layers: Sequence[Layer]) -> list[Tensor | None]:
        return [parameter.grad for layer in layers for parameter in layer.parameters()]

    def _add_up_copies(self) -> None:
        """What the plain loop gave each copy, in both."""
        for bucket, (low, high) in enumerate(self.schedule.tied):
            one, other = (self.layers[stage].shared[str(bucket)] for stage in (low, high))
            if one is not other and one.grad is not None:
                one.grad = other.grad = one.grad + other.grad


class Layer(nn.Module):
    """A linear layer with the factors that its stage shares with others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.shared = nn.ParameterDict()

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.linear(value))
        for factor in self.shared.values():
            value = value * factor
        return value


def assert_obeyed(schedule: Schedule, log: Log) -> None:
    """Each op started when all that it waits for had ended, and the op before it in its queue had ended (a transfer: started)."""
    before: dict[Op, Op] = {}
    transfers = set()
    last: dict[Any, Op] = {}
    for rank, lane, op in schedule.ops():
        is_transfer = lane not in COMPUTING
        queue = (rank, lane, op.stage, op.kind) if lane in MESSAGE_LANES else (rank, lane)
        if queue in last:
            before[op] = last[queue]
        last[queue] = op
        if is_transfer:
            transfers.add(op)
    started: list[Op] = []
    ended: set[Op] = set()
    for what, op in log:
        if what == "end":
            assert op in started, f"{op} ended before it started"
            ended.add(op)
            continue
        for awaited in schedule.waits.get(op, ()):
            assert awaited in ended, f"{op} started before {awaited} had ended"
        if op in before:
            assert before[op] in (started if op in transfers else ended), f"{op} started before {before[op]}"
        started.append(op)
    assert sorted(map(str, started)) == sorted(str(op) for _, _, op in schedule.ops()), "each op starts once"
    assert ended == set(started), "each op ends"


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()
