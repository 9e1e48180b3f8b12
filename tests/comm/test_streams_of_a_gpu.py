"""What of `CudaDevice` and of lanes can be seen without a GPU: which streams and events they take, and what they lend."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipetrain.comm.clocks import StepClock
from pipetrain.comm.device import HIGH, LOW, CpuDevice, CudaDevice
from pipetrain.comm.lanes import Lanes
from pipetrain.schedule.op import Kind, Lane, Op

CPU = torch.device("cpu")
NUM_STREAMS = 32


class PooledStream:
    """As torch's: of each priority there are 32, handed out in turn."""

    handed_out: dict[int, int]

    def __init__(self, device: torch.device, priority: int) -> None:  # noqa: ARG002
        number = self.handed_out[priority] = self.handed_out.get(priority, -1) + 1
        self.cuda_stream = 100 * -priority + number % NUM_STREAMS


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    PooledStream.handed_out = {}
    monkeypatch.setattr(torch.cuda, "Stream", PooledStream)
    return CudaDevice(torch.device("cuda", 0))


def test_nobody_gets_a_stream_that_another_has(gpu: CudaDevice) -> None:
    first = gpu.stream(priority=HIGH)
    for _ in range(100):
        gpu.stream(priority=HIGH)  # and let go of at once
    held = [gpu.stream(priority=HIGH) for _ in range(NUM_STREAMS - 1)]
    assert len({stream.cuda_stream for stream in (first, *held)}) == NUM_STREAMS
    assert gpu.stream(priority=LOW) is not None


def test_one_more_than_there_are_is_an_error_that_says_what_to_do(gpu: CudaDevice) -> None:
    held = [gpu.stream() for _ in range(NUM_STREAMS)]
    with pytest.raises(RuntimeError, match=r"cuda:0 has 32 streams of a priority.*fewer stages per rank"):
        gpu.stream()
    del held[5]
    assert gpu.stream().cuda_stream == 5


def test_what_is_lent_is_the_same_memory_under_another_owner(gpu: CudaDevice) -> None:
    """The allocator knows a block by its storage: that of an alias made through DLPack has no deleter of its own."""
    tensor = torch.zeros(4, dtype=torch.uint8)
    alias = gpu.lent(tensor)
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    alias.fill_(7)
    assert tensor.tolist() == [7] * 4
    memory = tensor.untyped_storage()
    del tensor
    assert torch._C._storage_Use_Count(memory._cdata) == 2, "an alias holds what it looks into"
    del alias
    gc.collect()
    assert torch._C._storage_Use_Count(memory._cdata) == 1


class Counting(CpuDevice):
    """A device that runs ahead, counts the events it makes, and knows which of them a stream is at."""

    runs_ahead = True

    def __init__(self) -> None:
        self.num_made = 0
        self.priorities: list[int] = []

    def stream(self, *, priority: int = LOW) -> Any:
        self.priorities.append(priority)
        return SimpleNamespace()

    def record(self, stream: Any, again: Any = None) -> Any:  # noqa: ARG002
        self.num_made += again is None
        event = SimpleNamespace() if again is None else again
        event.seconds = float(self.num_made)
        return event

    def clock(self) -> StepClock:
        return StepClock(lambda event: event.seconds, lambda: 0.0)


def step(lanes: Lanes) -> None:
    lanes.start_step()
    for number in range(3):
        for lane, kind in ((Lane.COMPUTE, Kind.F), (Lane.SEND, Kind.SEND_F)):
            op = Op(0, kind, number)
            with lanes.on(lane, (), op), lanes.timed(lane, op):
                pass
    lanes.end_step()


def test_events_are_used_again_when_nobody_asks_for_them() -> None:
    device = Counting()
    lanes = Lanes(0, device)
    made = []
    for _ in range(5):
        step(lanes)
        made.append(device.num_made)
    assert made == [made[0]] * 5


def test_events_that_somebody_may_ask_for_are_not() -> None:
    device = Counting()
    lanes = Lanes(0, device)
    step(lanes)
    recording = lanes.recording()
    before = recording.events()
    for _ in range(3):
        step(lanes)
    assert recording.events() == before


def test_messages_go_before_recomputation() -> None:
    device = Counting()
    lanes = Lanes(0, device)
    step(lanes)
    compute, recompute, message = device.priorities
    assert message <= compute < recompute
