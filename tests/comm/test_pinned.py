"""Messages through memory of the host: on the CPU, and on a device whose copies end late, next to one process."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late_device import LateDevice
from one_gpu import Shared, compare_all, every_case
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn

from pipetrain.comm.device import CpuDevice, OnWait, _waits_seen, choose_device
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError
from pipetrain.comm.forms import Form, TensorForm, flat_bytes
from pipetrain.comm.lanes import Lanes
from pipetrain.comm.pinned import _ReceivingSlot, _Slot
from pipetrain.comm.transport import AUTO, NCCL, PINNED, carrier_of
from pipetrain.config.load import load_config
from pipetrain.config.records import EDGES
from pipetrain.plan.plan import make_plan
from pipetrain.runtime import agreement, measure
from pipetrain.runtime import pipeline as runtime
from pipetrain.runtime.call_programs import Programs
from pipetrain.runtime.measure import waits_told
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.stage import Stage
from pipetrain.trainer.prepare import predict, prepare

LATE = [
    Shared("plain", "gpipe", "overlap"),
    Shared("pairs", "1f1b", "inline"),
    Shared("gaps", "interleaved", "early", 2),
]


def copies_end_late() -> None:
    runtime.make_lanes = lambda rank, device: Lanes(rank, LateDevice())  # type: ignore[assignment]


def test_late_copies_are_waited_for() -> None:
    """No slot is used again before what used it has ended, and nothing reads what has not come."""
    assert run_ranks(3, compare_all, "cpu", 3, LATE, copies_end_late) == [len(LATE)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_case_with_late_copies(num_ranks: int) -> None:
    run_ranks(num_ranks, compare_all, "cpu", num_ranks, every_case(), copies_end_late)


def test_a_message_waits_for_its_turn_in_a_slot() -> None:
    """A courier that is faster than the thread that launches does not receive over what that thread has not landed."""
    monitor = Monitor(0, FailureBoard(None), timeout_seconds=NEVER_SECONDS)
    slot = _ReceivingSlot(CpuDevice(), monitor)
    form = Form(None, (TensorForm((2,), (1,), torch.float32, needs_gradient=False),))
    (first,) = slot.tensors(form)
    slot.is_free = lambda: False
    came: list[Tensor] = []
    courier = threading.Thread(target=lambda: came.extend(slot.tensors(form)), daemon=True)
    courier.start()
    courier.join(0.05)
    assert came == []
    slot.is_free = lambda: True
    courier.join()
    assert came[0].data_ptr() == first.data_ptr()


def test_a_courier_goes_when_the_pipeline_has_failed() -> None:
    monitor = Monitor(0, FailureBoard(None), timeout_seconds=NEVER_SECONDS)
    slot = _ReceivingSlot(CpuDevice(), monitor)
    slot.is_free = lambda: False
    monitor.fail("rank 1 failed")
    with pytest.raises(PipelineError, match="rank 1 failed"):
        slot.tensors(Form(None, ()))


def test_a_slot_has_room_for_tensors_of_every_kind() -> None:
    given = [
        torch.arange(5, dtype=torch.uint8),
        torch.randn(3, dtype=torch.complex128),
        torch.zeros(0),
        torch.tensor(True),
        torch.randn(2, 3, dtype=torch.bfloat16).t(),
    ]
    slot = _Slot(CpuDevice())
    rooms = slot.like(given)
    for room, tensor in zip(rooms, given, strict=True):
        room.copy_(flat_bytes(tensor))
    for room, tensor in zip(rooms, given):
        assert room.dtype == tensor.dtype
        assert torch.equal(room, flat_bytes(tensor))
    again = slot.like(given[:1])
    assert again[0].data_ptr() == rooms[0].data_ptr()


# What reaches the schedule ----------------------------------------------------------------------------------------------


def test_ahead_reaches_the_schedule() -> None:
    wanted = make_schedule("1f1b", num_stages=2, num_microbatches=4, transport_ahead=0)
    plan = make_plan(4, num_ranks=2, num_microbatches=4, transport_ahead=0)
    program = Programs("1f1b", RecomputePolicy(), plan, rank=0).whole()
    assert program.schedule.waits == wanted.waits
    config = load_config(["experiment=smoke", "transport=serial", "pipeline=1f1b", "pipeline.num_microbatches=4"])
    run = prepare(config)
    assert run.plan.transport_ahead == run.schedule.transport_ahead == 0
    assert run.schedule.waits == wanted.waits
    assert predict(config).schedule.waits == wanted.waits


def test_edges_reach_the_plan() -> None:
    plan = prepare(load_config(["experiment=smoke", "transport=pinned", "transport.communicators=pair"])).plan
    assert (plan.edges, plan.communicators) == ("pinned", "pair")


# What the words mean on a machine, and what it lacks --------------------------------------------------------------------

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("edges", "device", "has_nccl", "carrier"),
    [
        ("auto", CPU, False, "gloo"),
        ("auto", GPU, True, "nccl"),
        ("nccl", GPU, True, "nccl"),
        ("pinned", GPU, True, "pinned"),
        ("pinned", GPU, False, "pinned"),
        ("pinned", CPU, False, "pinned"),
    ],
)
def test_what_carries_messages(
    edges: str, device: torch.device, has_nccl: bool, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    assert carrier_of(edges, device) == carrier


def test_the_carriers_are_those_of_the_config() -> None:
    assert set(EDGES) == {AUTO, NCCL, PINNED}


@pytest.mark.parametrize(
    ("edges", "device", "says"),
    [
        ("nccl", CPU, "transport.backend=nccl: NCCL carries messages between GPUs, .* use transport.backend=auto"),
        ("auto", GPU, "transport.backend=auto: this build of torch has no NCCL, .* or use transport.backend=pinned"),
        ("nccl", GPU, "transport.backend=nccl: this build of torch has no NCCL, .* or use transport.backend=pinned"),
    ],
)
def test_what_cannot_carry_them(edges: str, device: torch.device, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=says):
        carrier_of(edges, device)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"edges": "ncll"}, "transport.backend='ncll': allowed are auto, nccl, pinned; did you mean 'nccl'?"),
        ({"communicators": "rank"}, "transport.communicators='rank': allowed are edge, pair"),
        ({"transport_ahead": -1}, "transport.prefetch=-1: at least 0"),
    ],
)
def test_words_of_a_plan(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_plan(4, num_ranks=2, **given)


def are_refused() -> list[str]:
    """NCCL between CPUs; and what is said to ranks that say which carriers and GPUs they have."""
    rank, said, layers = dist.get_rank(), [], [nn.Linear(2, 2) for _ in range(3)]
    with pytest.raises(ValueError, match=r"transport\.backend") as caught:
        Pipeline(layers, plan=make_plan(3, num_ranks=3, edges="nccl"), timeout_seconds=NEVER_SECONDS)
    said.append(str(caught.value))
    for carriers, gpus in (((NCCL, NCCL, NCCL), "aba"), ((NCCL, "gloo", "gloo"), "abc")):
        agreement.carrier_of = lambda edges, device, own=carriers[rank]: own  # type: ignore[misc, assignment]
        agreement.identity_of = lambda device, own=gpus[rank]: f"GPU {own}"  # type: ignore[misc, assignment]
        with pytest.raises(ValueError, match="GPU") as caught:
            Pipeline(layers, timeout_seconds=NEVER_SECONDS)
        said.append(str(caught.value))
    return said


def test_two_ranks_on_one_gpu_and_carriers_that_do_not_fit_are_refused_by_all() -> None:
    said = run_ranks(3, are_refused)
    assert said == [said[0]] * 3
    _, of_one_gpu, of_two_kinds = said[0]
    assert of_one_gpu.startswith("ranks 0 and 2 are both on GPU a, and NCCL connects no two ranks of one GPU")
    assert "transport.backend=pinned" in of_one_gpu
    assert "\n" not in of_one_gpu
    assert of_two_kinds.startswith("messages between stages go over gloo on rank 1 and over nccl on rank 0")


# The GPU of a rank ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs and four ranks, this the last of them; CUDA has not started."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda device: None,
        "is_initialized": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_ranks_share_gpus_where_they_may(two_gpus: pytest.MonkeyPatch) -> None:
    assert choose_device(None) == CPU
    assert choose_device(None, shares_gpus=True) == torch.device("cuda", 1)
    two_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(None, shares_gpus=True) == torch.device("cuda", 0)
    two_gpus.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(None) == torch.device("cuda", 3)
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None, shares_gpus=True) == CPU


def test_cuda_starts_with_all_hardware_queues(two_gpus: pytest.MonkeyPatch) -> None:
    choose_device("cuda:1")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    two_gpus.setattr(torch.cuda, "is_initialized", lambda: True)
    choose_device("cuda:1")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            None,
            "CUDA has started with 8 hardware queues before .*: set CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment, or",
        ),
        ("1", "CUDA_DEVICE_MAX_CONNECTIONS=1: with so few hardware queues .*; set it to 32"),
        ("many", "CUDA_DEVICE_MAX_CONNECTIONS=many: with so few .*; set it to 32"),
    ],
)
def test_cuda_has_started_with_few(given: str | None, says: str, two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "is_initialized", lambda: True)
    if given is not None:
        two_gpus.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    with pytest.warns(UserWarning, match=says):
        choose_device("cuda")


# Layers that make the host wait -----------------------------------------------------------------------------------------


class Looks(nn.Module):
    """Says what torch says where the host waits for a GPU, which a CPU never makes it do."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn(
            "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:148.)", stacklevel=1
        )
        return x


class Watched(LateDevice):
    """Looks where a GPU would."""

    def watch_waits(self, on_wait: OnWait) -> AbstractContextManager[None]:
        return _waits_seen(on_wait)


def test_layers_that_wait_are_named_once() -> None:
    layers = [nn.Linear(2, 2), nn.Sequential(nn.Tanh(), Looks())]
    stage = Stage(1, layers, first_layer=4, device=CPU, meter=ActivationMeter())
    with warnings.catch_warnings(record=True, action="always") as told, waits_told({1: stage}, Watched()):
        for _ in range(3):
            nn.Sequential(*layers)(torch.ones(1, 2))
        Looks()(torch.ones(1))  # of no layer
        warnings.warn("something else", RuntimeWarning, stacklevel=1)
    other, line = (str(warning.message) for warning in told)
    assert other == "something else"
    assert line.startswith("layer 5 (Sequential) of stage 1 makes the host wait for the GPU in every microbatch (")
    assert f"{__file__}:" in line
    assert "\n" not in line


def test_what_pipetrain_waits_for_itself_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_OURS", str(Path(__file__).parent))
    stage = Stage(0, [Looks()], first_layer=0, device=CPU, meter=ActivationMeter())
    with warnings.catch_warnings(record=True) as told, waits_told({0: stage}, Watched()):
        stage.layers[0](torch.ones(1))
    assert told == []


def test_a_first_step_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "make_lanes", lambda rank, device: Lanes(rank, Watched()))
    layers = [nn.Linear(2, 2), Looks()]
    with (
        warnings.catch_warnings(record=True, action="always") as told,
        Pipeline(layers, nn.functional.mse_loss, num_microbatches=2) as pipeline,
    ):
        pipeline.step(torch.ones(4, 2), torch.ones(4, 2))
        first = [str(warning.message) for warning in told]
        told.clear()
        pipeline.step(torch.ones(4, 2), torch.ones(4, 2))
        later = {str(warning.message) for warning in told}
    assert [line.partition(" makes")[0] for line in first] == ["layer 1 (Looks) of stage 0"]
    assert all(line.startswith("called a synchronizing") for line in later), "looked at again"
