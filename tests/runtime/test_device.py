"""The device seam: on a recorder of streams, every op of a rank comes after the ops that it waits for.

The recorder is a device like another: it has streams, events and waits, and keeps of each event what must have happened
before (a vector clock). Ends as NCCL's are given to one rank in the middle: they launch on the lane's stream and do not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.clocks import StepClock
from pipetrain.comm.device import CpuDevice
from pipetrain.comm.failure import FailureBoard, Monitor
from pipetrain.comm.forms import Form, TensorForm
from pipetrain.comm.lanes import Lanes
from pipetrain.comm.transport import Transport
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.program import Program
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.stage import Stage

CPU = torch.device("cpu")
RANK, STAGES, M = 1, 3, 4


@dataclass(eq=False)
class _Stream:
    number: int
    count: int = 0
    after: dict[int, int] = field(
        default_factory=dict
    )  # stream -> how many of its events come before what is launched now


@dataclass(frozen=True)
class _Event:
    stream: int
    count: int
    after: dict[int, int]

    def comes_before(self, other: _Event) -> bool:
        return self.count <= other.after.get(self.stream, 0)


class Recorder(CpuDevice):
    runs_ahead = True

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._current = self.stream()

    def stream(self, *, priority: int = 0) -> _Stream:  # noqa: ARG002
        self._streams.append(_Stream(len(self._streams)))
        return self._streams[-1]

    def current(self) -> _Stream:
        return self._current

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record(self, stream: _Stream, again: Any = None) -> Any:  # noqa: ARG002
        stream.count += 1
        stream.after[stream.number] = stream.count
        return _Event(stream.number, stream.count, dict(stream.after))

    def wait(self, stream: _Stream, event: Any) -> None:
        for number, count in event.after.items():
            stream.after[number] = max(count, stream.after.get(number, 0))

    def follow(self, stream: _Stream, other: _Stream) -> None:
        self.wait(stream, self.record(other))

    def clock(self) -> StepClock:
        return StepClock(lambda event: float(event.count), lambda: 0.0)


@dataclass
class _End:
    """Either end of an edge whose transfers only get launched."""

    lanes: Lanes
    peer: str
    let_go: dict[Op, dict[int, int]]  # what had been sent, and what the compute stream came after when it was freed

    reads_later = True

    def post(self, op: Op, form: Form | None, make_buffers: Any, arrived: Any) -> None:
        assert form is not None
        with self.lanes.timed(Lane.RECV, op):
            buffers = [buffer.fill_(1.0) for buffer in make_buffers(form)]
        arrived(form, lambda: buffers)

    def send(self, op: Op, form: Form | None, tensors: Sequence[Tensor], left: Callable[[], None]) -> None:
        assert form is None
        with self.lanes.timed(Lane.SEND, op):
            for tensor in tensors:
                weakref.finalize(tensor.untyped_storage(), self._freed, op)
        left()

    def _freed(self, op: Op) -> None:
        self.let_go[op] = dict(self.lanes._streams[Lane.COMPUTE].after)

    def close(self) -> None: ...
    def abort(self) -> None: ...


class _Edges:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.let_go: dict[Op, dict[int, int]] = {}

    def end(self, edge: int, direction: str, place: int, peer: str) -> _End:  # noqa: ARG002
        return _End(self.lanes, peer, self.let_go)


def launch(
    schedule: Schedule,
    device: Recorder,
    between: Callable[[Lanes], None] | None = None,
    idle: frozenset[int] = frozenset(),
) -> tuple[Lanes, _Edges]:
    """One step of the rank in the middle; a second one where there is something to do between them. `idle` microbatches count nothing."""
    meter, board = ActivationMeter(), FailureBoard(None)
    lanes = Lanes(RANK, device)
    edges = _Edges(lanes)
    transport = Transport(schedule.stage_ranks, RANK, edges, meter, CPU, lanes)
    stage = Stage(RANK, [nn.Linear(3, 3), nn.Tanh()], first_layer=RANK, device=CPU, meter=meter)
    form = Form(pytree.tree_structure(0), (TensorForm((2, 3), (3, 1), torch.float32, True),))
    gradient = Form(None, (TensorForm((2, 3), (3, 1), torch.float32, False),))
    forms = {op: form if op.kind in (Kind.SEND_F, Kind.RECV_F) else gradient for _, _, op in schedule.ops()}
    executor = Executor(RANK, {RANK: stage}, transport, lanes, Monitor(RANK, board, timeout_seconds=1.0), board)
    for index in range(1 if between is None else 2):
        if index and between is not None:
            between(lanes)
        transport.start_step(forms, described=(False, False))
        executor.run(Program.of(schedule, RANK), Step(index, 0, with_graph=True, with_loss=True, idle=idle))
    return lanes, edges


def unordered(schedule: Schedule, lanes: Lanes, idle: frozenset[int] = frozenset()) -> list[str]:
    """The waits that no stream obeys; of an op that does nothing, its mark is start and end."""
    starts = {op: start for _, op, start, _ in lanes._spans}
    ends: dict[Op, Any] = dict(lanes._ended)
    own = {op for rank, _, op in schedule.ops() if rank == RANK}
    assert starts.keys() == {op for op in own if op.microbatch not in idle}
    starts |= {op: ends[op] for op in own - starts.keys()}
    return [
        f"{op} <- {awaited}"
        for op in starts
        for awaited in schedule.waits.get(op, ())
        if not ends[awaited].comes_before(starts[op])
    ]


@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
def test_streams_obey_every_wait(family: str, mode: str) -> None:
    policy = RecomputePolicy(mode, sets=2, keep="none")
    schedule = for_device(make_schedule(family, num_stages=STAGES, num_microbatches=M, recompute=policy))
    lanes, edges = launch(schedule, Recorder())
    assert unordered(schedule, lanes) == []
    ends = {op: end for _, op, _, end in lanes._spans}
    assert len(edges.let_go) == 2 * M
    for op, after in edges.let_go.items():
        assert ends[op].count <= after.get(ends[op].stream, 0), f"{op} may read what compute may write by now"


def test_streams_obey_what_is_awaited_through_a_microbatch_that_counts_nothing() -> None:
    schedule = for_device(make_schedule("1f1b", num_stages=STAGES, num_microbatches=M))
    idle = frozenset({1})
    lanes, _ = launch(schedule, Recorder(), idle=idle)
    assert unordered(schedule, lanes, idle) == []


def test_a_step_comes_after_the_one_before_whoever_calls_it() -> None:
    """Its receives may fill the buffers of the step before, and the caller may have gone to another stream of its own."""
    ends: list[_Event] = []

    def another_caller(lanes: Lanes) -> None:
        ends.extend(end for _, _, _, end in lanes._spans)
        device._current = device.stream()

    device = Recorder()
    lanes, _ = launch(for_device(make_schedule("1f1b", num_stages=STAGES, num_microbatches=M)), device, another_caller)
    starts = [start for lane, _, start, _ in lanes._spans if lane is Lane.RECV]
    assert all(end.comes_before(start) for end in ends for start in starts)
