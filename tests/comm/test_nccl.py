"""The ends of edges over NCCL, over a group that only writes down what it is asked for. Streams and memory: `tests/virtual_gpu`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from pipetrain.comm.device import CpuDevice
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError
from pipetrain.comm.forms import Form, TensorForm
from pipetrain.comm.lanes import Lanes
from pipetrain.comm.transport import Transport
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.stage.meter import ActivationMeter

CPU = torch.device("cpu")
SEND, RECV = Op(0, Kind.SEND_F, 0), Op(1, Kind.RECV_F, 0)
FORM = Form(None, (TensorForm((2, 3), (3, 1), torch.complex64, needs_gradient=True),))


class Device(CpuDevice):
    """A device on which the host runs ahead, by so much that nothing has ended before `ends`."""

    runs_ahead = True

    def __init__(self) -> None:
        self.ends = True
        self.lends: list[int] = []

    def has_ended(self, event: float) -> bool:  # noqa: ARG002
        return self.ends

    def lent(self, tensor: Tensor) -> Tensor:
        self.lends.append(tensor.data_ptr())
        return tensor.view_as(tensor)


class Group:
    """`ProcessGroupNCCL`, alone: a transfer is a line in `said`."""

    said: list[str]
    made: list[Group]

    def __init__(self, store: str, place: int, size: int, options: Any) -> None:
        assert size == 2
        self.name, self.place, self.options = store, place, options
        self.made.append(self)

    @staticmethod
    def Options() -> Any:  # noqa: N802
        return SimpleNamespace(config=SimpleNamespace(), is_high_priority_stream=False)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:  # noqa: ARG002
        self.said.append(f"send {tensors[0].dtype} x {tensors[0].numel()}".replace("torch.", ""))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:  # noqa: ARG002
        self.said.append(f"receive {tensors[0].dtype} x {tensors[0].numel()}".replace("torch.", ""))
        tensors[0].fill_(1)
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self) -> None:
        self.said.append(f"shut {self.name}")

    def abort(self) -> None:
        self.said.append(f"abort {self.name}")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, whatever torch was built with; couriers run at once, and forms are lines in `said`, too."""
    Group.said, Group.made = [], []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    module = importlib.import_module("pipetrain.comm.nccl")
    monkeypatch.setattr(module, "ProcessGroupNCCL", Group)
    monkeypatch.setattr(module, "PrefixStore", lambda name, _: name)
    monkeypatch.setattr(module, "make_pair", lambda *_: None)
    monkeypatch.setattr(module, "break_off", lambda *_: Group.said.append("break off"))
    monkeypatch.setattr(module, "Courier", AtOnce)
    monkeypatch.setattr(module, "send_form", lambda *_: Group.said.append("tell"))
    monkeypatch.setattr(module, "receive_form", lambda *_: FORM)
    return module


class AtOnce:
    def __init__(self, name: str, peer: str, monitor: Monitor) -> None:  # noqa: ARG002
        self.peer = peer

    def submit(self, what: str, job: Callable[[], Callable[[], None]]) -> None:  # noqa: ARG002
        job()()

    def close(self) -> None:
        Group.said.append("courier ends")


def make(nccl: ModuleType, stage_ranks: tuple[int, ...], rank: int, communicators: str = "edge") -> Any:
    monitor = Monitor(rank, FailureBoard(None), timeout_seconds=0.2)
    lanes = Lanes(rank, Device())
    return nccl.NcclEdges(HashStore(), HashStore(), lanes, monitor, CPU, stage_ranks, communicators), lanes, monitor


def test_a_form_goes_ahead_of_its_tensors(nccl: ModuleType) -> None:
    edges, lanes, _ = make(nccl, (0, 1), 0)
    end = edges.end(0, "F", 0, "rank 1")
    Group.said.clear()
    lanes.start_step()
    tensors = [torch.zeros(2, 3, dtype=torch.complex64), torch.zeros(0), torch.ones(5, dtype=torch.bool)]
    with lanes.on(Lane.SEND, (), SEND):
        end.send(SEND, FORM, tensors, lambda: Group.said.append("left"))
    assert Group.said == ["tell", "send uint8 x 48", "send uint8 x 5", "left"]
    assert lanes.device.lends == [tensors[0].data_ptr(), tensors[2].data_ptr()], "the allocator is not told of NCCL"
    assert end.reads_later


def test_a_receive_of_unknown_form_waits_for_it_at_its_turn(nccl: ModuleType) -> None:
    edges, lanes, _ = make(nccl, (0, 1), 1)
    transport = Transport((0, 1), 1, edges, ActivationMeter(), CPU, lanes)
    Group.said.clear()
    lanes.start_step()
    transport.start_step({}, described=(True, True))
    with lanes.on(Lane.RECV, (), RECV):
        transport.post(RECV)
        assert Group.said == ["receive uint8 x 48"]
    ((op, land),) = transport.ended
    land()
    transport.ended.clear()
    assert op == RECV
    assert lanes._ended[RECV], "what waits for it waits for an event"
    leaves, form = transport.take(RECV)
    assert form == FORM
    assert leaves[0].dtype == torch.complex64


def test_a_form_that_does_not_come_is_a_time_out_that_names_the_op(
    nccl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtOnce, "submit", lambda *_: None)
    edges, lanes, monitor = make(nccl, (0, 1), 1)
    transport = Transport((0, 1), 1, edges, ActivationMeter(), CPU, lanes)
    lanes.start_step()
    transport.start_step({}, described=(True, True))
    with pytest.raises(PipelineError, match="rank 1 waits in 1RECV_F0 from rank 0"):
        transport.post(RECV)
    assert monitor.failure is not None


def test_closing_waits_for_the_device_and_shuts_each_communicator_once(nccl: ModuleType) -> None:
    edges, lanes, _ = make(nccl, (0, 1, 0, 1), 0, "pair")
    transport = Transport((0, 1, 0, 1), 0, edges, ActivationMeter(), CPU, lanes)
    Group.said.clear()
    transport.close()
    transport.close()
    assert Group.said[::2] == ["courier ends"] * 2
    assert sorted(Group.said[1::2]) == ["shut pair/0/1", "shut pair/1/0"]
    transport.abort()
    assert len(Group.said) == 4, "there is nothing left to break"


def test_a_device_that_does_not_end_does_not_hang_the_close(nccl: ModuleType) -> None:
    edges, lanes, monitor = make(nccl, (0, 1), 0)
    transport = Transport((0, 1), 0, edges, ActivationMeter(), CPU, lanes)
    lanes.device.ends = False
    with pytest.raises(PipelineError, match="rank 0 waits for its device: the last messages with rank 1"):
        transport.close()
    assert monitor.failure is not None
    transport.abort()
    assert not any(line.startswith("shut") for line in Group.said)


def test_after_a_failure_nobody_waits(nccl: ModuleType) -> None:
    edges, lanes, monitor = make(nccl, (0, 1), 0)
    transport = Transport((0, 1), 0, edges, ActivationMeter(), CPU, lanes)
    lanes.device.ends = False
    monitor.fail("rank 1 failed")
    Group.said.clear()
    transport.abort()
    transport.close()
    assert sorted(Group.said) == sorted(
        ["break off", "abort edge/0/F", "break off", "abort edge/0/B", "courier ends", "courier ends"]
    )


def test_what_torch_is_asked_for(nccl: ModuleType) -> None:
    make(nccl, (0, 1), 0)[0].end(0, "F", 0, "rank 1")
    (group,) = Group.made
    assert group.options.is_high_priority_stream, "messages go before F, R and B"
    assert group.options.config.max_ctas == 4
    assert group.options._timeout.total_seconds() > 60, "our own time-out names the rank first"


@pytest.mark.parametrize(("communicators", "expected"), [("edge", 12), ("pair", 4)])
def test_communicators_of_three_stages_per_rank(nccl: ModuleType, communicators: str, expected: int) -> None:
    """Of ranks 1 and 2 of four, in a loop: rank 1 has three edges before and three after, in two directions."""
    stage_ranks = (0, 1, 2, 3) * 3
    edges, lanes, _ = make(nccl, stage_ranks, 1, communicators)
    Transport(stage_ranks, 1, edges, ActivationMeter(), CPU, lanes)
    own = {group.name: group.place for group in Group.made}
    assert len(Group.made) == len(own) == expected
    other_edges, other_lanes, _ = make(nccl, stage_ranks, 2, communicators)
    Group.made.clear()
    Transport(stage_ranks, 2, other_edges, ActivationMeter(), CPU, other_lanes)
    common = {group.name: group.place for group in Group.made if group.name in own}
    assert len(common) == (6 if communicators == "edge" else 2)
    for name, place in common.items():
        assert own[name] + place == 1, f"{name}: one end is 0 and the other 1"


class Meetings:
    """`transport.Edges` of one rank: whom it meets, in order."""

    def __init__(self) -> None:
        self.order: list[tuple[int, str]] = []

    def end(self, edge: int, direction: str, place: int, peer: str) -> Any:  # noqa: ARG002
        self.order.append((edge, direction))


def rounds(stage_ranks: tuple[int, ...]) -> int:
    """How long all meetings take, of which each takes 1 and needs both ranks."""
    left: list[list[tuple[int, str]]] = []
    for rank in range(max(stage_ranks) + 1):
        meetings = Meetings()
        Transport(stage_ranks, rank, meetings, ActivationMeter(), CPU, Lanes(rank, CpuDevice()))
        left.append(meetings.order)
    for number in itertools.count():
        if not any(left):
            return number
        heads = [order[0] for order in left if order]
        met = {head for head in heads if heads.count(head) == 2}
        assert met, f"nobody can meet: {left}"
        left = [order[1:] if order and order[0] in met else order for order in left]
    raise AssertionError


def test_all_meet_in_two_rounds() -> None:
    assert rounds((0, 1)) == 2  # one for each direction
    assert rounds(tuple(range(64))) == 2 * 2


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_with_several_stages_per_rank_all_meet(num_ranks: int, stages_per_rank: int) -> None:
    loop = tuple(range(num_ranks)) * stages_per_rank
    there_and_back = (*range(num_ranks), *reversed(range(num_ranks))) * stages_per_rank
    assert rounds(loop) <= 2 * stages_per_rank * 3
    rounds(there_and_back)
