"""Ranks in one process: the real executor, transport and stages, over ends that deliver late and in any legal order.

Each rank is a thread, and one runs at a time: it runs until it comes to an op or has to wait, and then `choose` picks what
happens next: a rank goes on, a message crosses an edge, or an end tells its rank that the transfer has ended. What is legal:
the messages of an edge and direction cross in the order in which they were sent; nothing else is promised. Where nothing
can happen any more, the ranks hang: `Hang` says what each waits in.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.group.failure import FailureBoard, Monitor
from pipetrain.parallel.replicas import SharedGradients
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.program import COMPUTING, Program
from pipetrain.runtime.segmented import AnyStage, make_stage, parameters_of_parts
from pipetrain.schedule.kinds import MESSAGE_LANES
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.without import without_microbatches
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.seeding import generators_restored
from pipetrain.transport.device import CpuDevice
from pipetrain.transport.forms import Form
from pipetrain.transport.lanes import Lanes
from pipetrain.transport.transport import Transport

CPU = torch.device("cpu")
WIDTH = 3

Choose = Callable[[int], int]  # of so many things that may happen next, the one that does
Log = list[tuple[str, Op]]  # ("start" | "end", op) in the order in which it happened, of all ranks


class Hang(AssertionError):
    """Nothing can happen any more, and there are ops that have not ended."""


class _Given(BaseException):
    """Ends the thread of a rank whose run is given up."""


@dataclass
class _Paused:
    """A rank that has stopped: where, and when it may go on."""

    ready: Callable[[], bool]
    what: Callable[[], str]


class Theatre:
    """Lets one thread run at a time."""

    def __init__(self, choose: Choose) -> None:
        self.wires: list[Wire | Meeting] = []
        self._choose = choose
        self._paused: dict[int, _Paused] = {}
        self._turns: dict[int, threading.Semaphore] = {}
        self._director = threading.Semaphore(0)
        self._over = False

    def play(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run each part in a thread of its own, to its end.

        Raises:
            Hang, or what a part raises.
        """
        self._over = False
        errors: dict[int, BaseException] = {}
        threads = [threading.Thread(target=self._act, args=(rank, part, errors)) for rank, part in enumerate(parts)]
        for rank, thread in enumerate(threads):
            self._turns[rank] = threading.Semaphore(0)
            self._paused[rank] = _Paused(lambda: True, lambda: "the start")
            thread.start()
        try:
            while self._paused and not errors:
                moves = [*self._ranks_that_may_go_on(), *(move for wire in self.wires for move in wire.moves())]
                if not moves:
                    raise Hang("; ".join(f"rank {rank}: {at.what()}" for rank, at in self._paused.items()))
                moves[self._choose(len(moves))]()
        finally:
            self._over = True
            for rank in list(self._paused):
                self._resume(rank)
            for thread in threads:
                thread.join()
        for error in errors.values():
            raise error

    def pause(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Called by the thread of a rank: let others go on; returns when `ready()` and chosen."""
        self._paused[rank] = _Paused(ready, what)
        self._director.release()
        self._turns[rank].acquire()
        if self._over:
            raise _Given

    def _ranks_that_may_go_on(self) -> Iterator[Callable[[], None]]:
        for rank, at in list(self._paused.items()):
            if at.ready():
                yield lambda rank=rank: self._resume(rank)  # type: ignore[misc]

    def _resume(self, rank: int) -> None:
        del self._paused[rank]
        self._turns[rank].release()
        self._director.acquire()

    def _act(self, rank: int, part: Callable[[], None], errors: dict[int, BaseException]) -> None:
        self._turns[rank].acquire()
        try:
            if not self._over:
                part()
        except _Given:
            pass
        except BaseException as error:
            errors[rank] = error
        finally:
            self._director.release()


@dataclass
class _Message:
    op: Op
    form: Form | None
    tensors: list[Tensor]
    left: Callable[[], None]


@dataclass
class _Post:
    op: Op
    form: Form | None
    make_buffers: Callable[[Form], list[Tensor]]
    arrived: Callable[[Form, Callable[[], list[Tensor]]], None]


class Wire:
    """One stage edge and direction. `buffered`: a send may end before its receive is posted, as small messages of NCCL do."""

    def __init__(self, log: Log, *, buffered: bool) -> None:
        self.sends: deque[_Message] = deque()
        self.posts: deque[_Post] = deque()
        self._buffered = buffered
        self._flying: deque[tuple[Form | None, list[Tensor]]] = deque()
        self._sent: list[tuple[Op, Callable[[], None]]] = []  # what the sender's end has not been told: one at most
        self._came: list[tuple[Op, Callable[[], None]]] = []
        self._log = log

    def moves(self) -> Iterator[Callable[[], None]]:
        for told in (self._sent, self._came):
            if told:
                yield lambda told=told: self._tell(told)  # type: ignore[misc]
        if self.sends and not self._sent and (self._buffered or (self.posts and not self._came)):
            yield self._depart
        elif self._flying and self.posts and not self._came:
            yield self._arrive

    def _tell(self, told: list[tuple[Op, Callable[[], None]]]) -> None:
        op, tell = told.pop()
        self._log.append(("end", op))
        tell()

    def _depart(self) -> None:
        message = self.sends.popleft()
        self._flying.append((message.form, [tensor.clone() for tensor in message.tensors]))
        self._sent.append((message.op, message.left))
        if not self._buffered:
            self._arrive()

    def _arrive(self) -> None:
        post = self.posts.popleft()
        in_front, tensors = self._flying.popleft()
        form = in_front or post.form
        assert form is not None, f"{post.op}: neither end knows the form"
        buffers = post.make_buffers(form)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self._came.append((post.op, lambda: post.arrived(form, lambda: buffers)))


@dataclass
class _Inbound:
    wire: Wire
    peer: str

    def post(self, op: Op, form: Form | None, make_buffers: Any, arrived: Any) -> None:
        self.wire.posts.append(_Post(op, form, make_buffers, arrived))

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass
class _Outbound:
    wire: Wire
    peer: str

    tells_changes = True
    reads_later = False

    def send(
        self,
        op: Op,
        form: Form | None,
        tensors: list[Tensor],
        left: Callable[[], None],
        expected: Form | None = None,  # noqa: ARG002
    ) -> None:
        self.wire.sends.append(_Message(op, form, tensors, left))

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass
class _Sum:
    op: Op
    tensors: list[Tensor]
    settle: Callable[[], None]
    ended: Callable[[], None]
    log: Log


class Meeting:
    """Ranks that add up gradients: each in its own order, and all at once."""

    def __init__(self, num_ranks: int) -> None:
        self.queues: list[deque[_Sum]] = [deque() for _ in range(num_ranks)]
        self._told: list[list[_Sum]] = [[] for _ in range(num_ranks)]

    def moves(self) -> Iterator[Callable[[], None]]:
        for told in self._told:
            if told:
                yield lambda told=told: self._tell(told)  # type: ignore[misc]
        if all(self.queues) and not any(self._told):
            yield self._add

    def _add(self) -> None:
        sums = [queue.popleft() for queue in self.queues]
        first = sums[0].op
        stages = {first.stage, first.peer} - {None}
        for one in sums:
            is_same = {one.op.stage, one.op.peer} - {None} == stages and one.op.part == first.part
            assert is_same, f"{one.op} meets {first}"
        for tensors in zip(*(one.tensors for one in sums), strict=True):
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.copy_(total)
        for told, one in zip(self._told, sums):
            one.settle()
            told.append(one)

    def _tell(self, told: list[_Sum]) -> None:
        one = told.pop()
        one.log.append(("end", one.op))
        one.ended()


@dataclass
class _Reducer:
    queue: deque[_Sum]
    peer: str
    log: Log

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]) -> None:
        self.queue.append(_Sum(op, tensors, settle, ended, self.log))

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass
class _Edges:
    """`transport.Edges` of one replica: both ends of an edge get the same wire. `meetings` are those of all replicas."""

    theatre: Theatre
    buffered: bool
    log: Log
    meetings: dict[tuple[int, ...], Meeting]
    wires: dict[tuple[int, str], Wire] = field(default_factory=dict)

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> _Reducer:
        if ranks not in self.meetings:
            meeting = self.meetings[ranks] = Meeting(len(ranks))
            self.theatre.wires.append(meeting)
        return _Reducer(self.meetings[ranks].queues[place], peer, self.log)

    def inbound(self, edge: int, direction: str, place: int, peer: str) -> _Inbound:  # noqa: ARG002
        return _Inbound(self._wire(edge, direction), peer)

    def outbound(self, edge: int, direction: str, place: int, peer: str) -> _Outbound:  # noqa: ARG002
        return _Outbound(self._wire(edge, direction), peer)

    def _wire(self, edge: int, direction: str) -> Wire:
        if (edge, direction) not in self.wires:
            wire = self.wires[edge, direction] = Wire(self.log, buffered=self.buffered)
            self.theatre.wires.append(wire)
        return self.wires[edge, direction]


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
        self.schedules = [without_microbatches(schedule, own) if own else schedule for own in skipped]
        self.schedules = self.schedules or [schedule] * schedule.num_replicas
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
        self._forms: list[dict[Op, Form]] = [{} for _ in range(schedule.num_ranks * schedule.num_replicas)]
        meetings: dict[tuple[int, ...], Meeting] = {}
        edges = [_Edges(self.theatre, buffered, log, meetings) for log in self.logs]
        self.transports: list[Transport] = []
        self.stages: list[dict[int, AnyStage]] = []
        self.shared: list[SharedGradients] = []
        self.executors = [
            self._make_executor(replica, place, edges[replica])
            for replica in range(schedule.num_replicas)
            for place in range(schedule.num_ranks)
        ]

    def _make_executor(self, replica: int, place: int, edges: _Edges) -> Executor:
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
                device=CPU,
                meter=meter,
                loss_fn=mean_square if index == self.schedule.num_stages - 1 else None,
            )
            for index, owner in enumerate(self.schedule.stage_ranks)
            if owner == place
        }
        for stage in stages.values():
            stage._probe.done = True  # it looks at every tensor of the process
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
        step = Step(self._num_steps, 0, self.schedule.num_stages, with_graph=with_graph, with_loss=True)
        step.microbatches, step.targets = list(self.inputs[own]), list(self.targets[own])
        step.weights, step.first_microbatch = [1 / len(self.inputs)] * m, own.start
        described = self._num_steps == 0
        self.transports[rank].start_step(self._forms[rank], described=(described, described))
        self.executors[rank].run(Program.of(self.schedules[replica], place), step)
        self.shared[rank].finish(lambda tensor, what: tensor)
        self.outputs.update({own.start + number: output for number, output in step.outputs.items()})

    def assert_right(self, logs: Sequence[Log]) -> None:
        """Every op obeyed its waits and its queue, and every value is that of a plain loop over the microbatches."""
        for schedule, log in zip(self.schedules, logs, strict=True):
            assert_obeyed(schedule, log)
        found = [self._gradients(layers) for layers in self.replicas]
        for layer in self.layers:
            layer.zero_grad()
        m = len(self.inputs)
        starts = range(0, m, self.schedule.num_microbatches)
        for number in (start + number for start, own in zip(starts, self.schedules) for number in own.microbatches):
            value = self.inputs[number]
            for layer in self.layers:
                value = layer(value)
            loss = mean_square(value, self.targets[number]) / m
            torch.testing.assert_close(self.outputs[number], loss.detach(), rtol=1e-12, atol=0)
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
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

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
