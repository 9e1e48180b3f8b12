"""What only CUDA can do: lanes as streams. Run by `make gpu-check`; needs torch and pytest, one GPU, no network."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.replay.kernels import beside, kernels_of
from pipetrain import Pipeline, RecomputePolicy, reference_step
from pipetrain.schedule.op import Kind, Lane, Op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: no GPU on this machine"),
]

ACTIVITIES = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
MODES = ["never", "inline", "early", "overlap"]
SLOW_CYCLES = 100_000_000  # about 50 ms


class Slow(nn.Module):
    """A linear layer whose forward takes long on the device: whoever does not wait for it reads stale memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, value: Tensor) -> Tensor:
        torch.cuda._sleep(SLOW_CYCLES)
        return torch.tanh(self.inner(value))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target.float()) ** 2).mean()


def make_model(size: int = 256, dropout: float = 0.1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(size, size), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers).cuda()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_all_modes(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = make_model().to(dtype)
    reference = copy.deepcopy(ours)
    inputs, targets = torch.randn(64, 256, device="cuda", dtype=dtype), torch.randn(64, 256, device="cuda", dtype=dtype)
    with Pipeline(ours, mse, stages_per_rank=4, schedule="interleaved", recompute=mode, balance=[3] * 4) as pipeline:
        loss = pipeline.step(inputs, targets)
    expected = reference_step(reference, mse, inputs, targets, num_microbatches=8)
    torch.testing.assert_close(loss, expected.cpu())
    for name, gradient in gradients(reference).items():
        torch.testing.assert_close(gradients(ours)[name], gradient)


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_producer_is_waited_for(mode: str) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(*[Slow(64) for _ in range(3)]).cuda()
    reference = copy.deepcopy(ours)
    inputs, targets = torch.randn(16, 64, device="cuda"), torch.randn(16, 64, device="cuda")
    with Pipeline(ours, mse, num_microbatches=4, stages_per_rank=3, schedule="interleaved", recompute=mode) as pipeline:
        pipeline.step(inputs, targets)
    found = gradients(ours)
    reference_step(reference, mse, inputs, targets, num_microbatches=4)
    for name, gradient in gradients(reference).items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("sets", [1, 3])
def test_memory_of_a_set_is_not_reused_early(sets: int) -> None:
    """R of the next microbatch allocates while B still reads: with too early reuse the gradients differ from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(6)]).cuda()
    inputs = torch.randn(512, 2048, device="cuda")
    policy = RecomputePolicy("overlap", sets=sets, keep="none", last_stage="always")
    found = []
    with Pipeline(model, mse, stages_per_rank=3, schedule="interleaved", recompute=policy) as pipeline:
        for _ in range(5):
            pipeline.zero_grad()
            pipeline.step(inputs, inputs)
            found.append(gradients(model))
    for again in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(again[name], gradient)


def test_the_version_check_holds_on_a_gpu() -> None:
    class Spoils(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            result = torch.exp(value)
            return result.mul_(2.0)

    model = nn.Sequential(nn.Linear(8, 8), Spoils()).cuda()
    inputs = torch.randn(4, 8, device="cuda")
    pipeline = Pipeline(model, mse, num_microbatches=2, recompute=RecomputePolicy("overlap", last_stage="always"))
    with pytest.raises(RuntimeError, match="changed in place"):
        pipeline.step(inputs, inputs)


def test_recompute_ran_on_its_own_stream() -> None:
    """By the profiler: kernels of R on one stream, of F and B on another, and some time on both at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)]).cuda()
    inputs = torch.randn(2048, 2048, device="cuda")
    policy = RecomputePolicy("overlap", last_stage="always")
    with Pipeline(model, mse, stages_per_rank=2, schedule="interleaved", recompute=policy) as pipeline:
        pipeline.step(inputs, inputs)
        with torch.profiler.profile(activities=ACTIVITIES) as profile:
            pipeline.step(inputs, inputs)
            torch.cuda.synchronize()
        report = pipeline.gather_report()
    seen = beside(kernels_of(profile))
    print(seen)
    assert len(seen.recompute_streams) == 1, seen
    assert len(seen.compute_streams) == 1, seen
    assert seen.recompute_streams.isdisjoint(seen.compute_streams), seen
    assert seen.recompute_seconds > 0, seen
    assert report is not None
    lanes = {event.op: event.lane for event in report.timeline.events}
    assert lanes[Op(0, Kind.R, 0)] is Lane.RECOMPUTE
    assert lanes[Op(0, Kind.B, 0)] is Lane.COMPUTE


def test_a_save_copies_what_was_there_beside_the_training(tmp_path: Path) -> None:
    """The copies run on a stream of their own, after the kernels that make the values and before those that change them."""
    pytest.importorskip("safetensors")
    from pipetrain.snapshot.files import path_of
    from pipetrain.snapshot.reader import Snapshot
    from pipetrain.snapshot.saver import Saver
    from pipetrain.snapshot.state import Part, RunState

    saver = Saver(tmp_path, rank=0, agree=lambda value: value, keep_last=2, say=print)
    weight = torch.zeros(1 << 24, device="cuda")
    for step in (1, 2):  # the second save uses the buffers of the first
        torch.cuda._sleep(SLOW_CYCLES)
        weight.fill_(step)
        saver.save(RunState(step, 1, {}, {}), {Part.WEIGHTS: {"w": weight}})
        saver.before_update()
        weight.fill_(-1)
    saver.wait()
    for step in (1, 2):
        assert bool((Snapshot(path_of(tmp_path, step)).tensors(Part.WEIGHTS)["w"] == step).all())
