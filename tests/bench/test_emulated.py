"""An emulated stage spends its time where a real one would, and the byte meter sees what ours sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import emulated
from benchmarks.emulated import NUM_SAVED, EmulatedStage, EmulatedWorkload
from benchmarks.live import LiveStorages
from benchmarks.systems import Ours
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import LastStage, Mode


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps of the device, in order; none is slept."""
    sleeps: list[float] = []
    monkeypatch.setattr(emulated.time, "sleep", sleeps.append)
    return sleeps


def test_an_op_of_a_peer_sleeps_its_part(slept: list[float]) -> None:
    """Recomputation sleeps again, a backward without an input gradient takes all its time, a hurried step sleeps less."""
    stage = EmulatedStage(1.0, 2.0, 0.5)
    checkpoint(stage, torch.zeros(1, 4), use_reentrant=False).sum().backward()
    assert slept == [1.0, 1.0, 2.0]
    assert stage.forwards == 2
    stage(torch.zeros(1, 4)).sum().backward()
    with emulated.hurried(0.25):
        emulated.occupy_device(2.0)
    emulated.occupy_device(2.0)
    assert slept[3:] == [1.0, 2.0, 0.5, 2.0]


@pytest.mark.parametrize(("recomputes", "in_input_half", "in_weight_half"), [(False, [], []), (True, [1.0], [1.0])])
def test_halves_of_a_peer_sleep_their_part(
    slept: list[float], recomputes: bool, in_input_half: list[float], in_weight_half: list[float]
) -> None:
    """torch computes I and W in two passes over one graph; with its checkpoint each of them runs the forward again."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # a second

    stage = EmulatedStage(1.0, 2.0, 0.5)
    given = torch.zeros(1, 4, requires_grad=True)
    output = checkpoint(stage, given, use_reentrant=False) if recomputes else stage(given)
    slept.clear()
    _, groups = stage_backward_input([output], [torch.ones(1, 4)], [given], stage.parameters())
    assert slept == [*in_input_half, 1.5]
    slept.clear()
    stage_backward_weight(stage.parameters(), groups)
    assert slept == [*in_weight_half, 0.5]


def test_layers_of_a_stage_share_its_time_and_its_set(slept: list[float]) -> None:
    whole = EmulatedWorkload(2, forward_seconds=1.0, backward_seconds=2.0, tensor_bytes=400)
    parted = EmulatedWorkload(2, forward_seconds=1.0, backward_seconds=2.0, tensor_bytes=400, layers_per_stage=2)
    held = []
    for workload in (whole, parted):
        layers = nn.Sequential(*(build() for build in workload.layers()[: workload.balance()[0]]))
        given = workload.stage_input(0)
        slept.clear()
        with LiveStorages([given, *layers.parameters()], every_operation=True) as live:
            output = layers(given)
        held.append(live.current_bytes)
        output.sum().backward()
        assert sum(slept) == 3.0
    assert held == [NUM_SAVED * 400] * 2
    assert parted.costs(stages_per_rank=2).forward == (0.5,) * 4


@pytest.mark.parametrize(("mode", "forwards"), [(Mode.NEVER, 4), (Mode.INLINE, 8), (Mode.OVERLAP, 8)])
def test_our_recompute_sleeps_again(slept: list[float], mode: Mode, forwards: int) -> None:
    workload = EmulatedWorkload(1, num_microbatches=4, forward_seconds=1.0, backward_seconds=2.0, tensor_bytes=64)
    runner = Ours(mode=mode, last_stage=LastStage.ALWAYS).start(workload)
    runner.step()
    runner.close()
    ahead = 1  # a copy of the layer, before the first forward of its kind
    assert slept.count(1.0) == forwards + ahead
    assert slept.count(2.0) == 4


@pytest.mark.parametrize("mode", list(Mode))
def test_live_bytes_agree_with_the_activation_meter(mode: Mode) -> None:
    torch.manual_seed(0)  # a mean that happens to be near 0 differs from the mean of means by more than rounding
    layers = [nn.Linear(64, 64) for _ in range(6)]
    batch = torch.randn(4 * 512, 64)
    with Pipeline(layers, lambda out, _: out.mean(), num_microbatches=4, recompute=mode) as pipeline:
        pipeline.step(batch, batch)
        left_out = [batch, *pipeline.parameters(), *(weight.grad for weight in pipeline.parameters())]
        with LiveStorages([tensor for tensor in left_out if tensor is not None], every_operation=True) as live:
            pipeline.step(batch, batch)
        # What the meter leaves out is what one operation needs while it runs; it counts the batch, which `live` leaves out.
        metered = pipeline.report.peak_activation_bytes
    one = 512 * 64 * 4
    assert abs(live.peak_bytes - (metered - batch.untyped_storage().nbytes())) <= 3 * one


def test_an_emulated_forward_hands_on_one_value_and_holds_sixteen_tensors_of_its_size() -> None:
    stage, given = EmulatedStage(0.0, 0.0), torch.full((1, 100), 3.0)
    with LiveStorages([given, *stage.parameters()], every_operation=True) as live:
        output = stage(given)
    assert output.shape == given.shape
    assert output.flatten()[0] == 3.0
    assert output.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    assert live.current_bytes == NUM_SAVED * 400
    del output
    assert live.current_bytes == 0
