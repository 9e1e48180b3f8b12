"""What a run computes after a resume is what it computes without one, bit for bit, dropout included."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from saved import CPU
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import RunState, tensors_of

SEED = 5
Losses = list[float]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """How a run is split."""

    num_ranks: int
    schedule: str = "gpipe"
    recompute: str = "overlap"
    balance: Sequence[int] | str = "auto"
    stages_per_rank: int = 1


TWO = Shape(2)
THREE = Shape(3, schedule="1f1b", recompute="inline", balance=[1, 2, 3])
INTERLEAVED = Shape(2, schedule="interleaved", recompute="early", stages_per_rank=2)
ONE = Shape(1, recompute="never")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, 8, generator=generator), torch.randn(7, 8, generator=generator)


def largest(value: int) -> int:
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def train(folder: str, shape: Shape, start: int, end: int) -> tuple[Losses, dict[str, Any], list[float]]:
    """Steps `start` + 1 to `end`, from the snapshot after `start`, with a snapshot at the end.

    Returns the losses, what this rank started from (as arrays), and what its generator draws next.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    with Pipeline(
        [Layer] * 6,
        nn.functional.mse_loss,
        num_microbatches=3,
        schedule=shape.schedule,
        recompute=shape.recompute,
        balance=shape.balance,
        stages_per_rank=shape.stages_per_rank,
        seed=SEED,
    ) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.05)
        if start:
            snapshot = Snapshot(path_of(pathlib.Path(folder), start))
            snapshot.restore(pipeline, optimizer, rank, CPU)
            pipeline.step_index = snapshot.state.step
        before = tensors_of(pipeline, optimizer, CPU)
        restored = {f"{part}/{name}": value.clone().numpy() for part in before for name, value in before[part].items()}
        losses = []
        for step in range(start, end):
            torch.rand(())  # what the user's own code draws
            losses.append(float(pipeline.step(*batch(step))))
            pipeline.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        saver = Saver(pathlib.Path(folder), rank=rank, agree=largest, keep_last=9, say=print)
        saver.save(RunState(end, shape.num_ranks, {}, {}), tensors_of(pipeline, optimizer, CPU))
        saver.wait()
        assert saver.last_step == end
    return losses, restored, torch.rand(2).tolist()


def run(folder: pathlib.Path, shape: Shape, start: int, end: int) -> list[Any]:
    return run_ranks(shape.num_ranks, train, str(folder), shape, start, end)


def losses_of(outcomes: list[Any]) -> Losses:
    assert all(losses == outcomes[0][0] for losses, _, _ in outcomes)
    return outcomes[0][0]


def tensors_in(folder: pathlib.Path, step: int) -> State:
    """Weights and optimizer state of a snapshot; generators belong to ranks."""
    snapshot = Snapshot(path_of(folder, step))
    found = {}
    for part in ("weights", "optimizer"):
        files = snapshot.tensors(part)
        found.update({f"{part}/{name}": files[name] for name in files})
    return found


def assert_equal(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_same_split_goes_on_exactly(tmp_path: pathlib.Path) -> None:
    undisturbed = run(tmp_path / "whole", TWO, 0, 6)
    run(tmp_path / "parts", TWO, 0, 3)
    resumed = run(tmp_path / "parts", TWO, 3, 6)
    assert losses_of(resumed) == losses_of(undisturbed)[3:]
    assert [drawn for _, _, drawn in resumed] == [drawn for _, _, drawn in undisturbed]
    assert_equal(tensors_in(tmp_path / "parts", 6), tensors_in(tmp_path / "whole", 6))


def test_other_splits_schedules_and_modes_go_on_exactly(tmp_path: pathlib.Path) -> None:
    undisturbed = losses_of(run(tmp_path / "whole", ONE, 0, 8))
    losses = []
    for number, shape in enumerate((TWO, THREE, INTERLEAVED, ONE)):
        start = 2 * number
        saved = tensors_in(tmp_path / "parts", start) if start else {}
        outcomes = run(tmp_path / "parts", shape, start, start + 2)
        losses += losses_of(outcomes)
        if start:
            restored = {}
            for _, state, _ in outcomes:
                restored.update(
                    {name: torch.from_numpy(value) for name, value in state.items() if "generators" not in name}
                )
            assert_equal(restored, saved)
    assert losses == undisturbed
    assert_equal(tensors_in(tmp_path / "parts", 8), tensors_in(tmp_path / "whole", 8))
