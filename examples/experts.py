"""A mixture of experts with a loss that spreads the load: `torchrun --nproc-per-node=2 examples/experts.py runs/experts`.

Each layer gives the loss of its own router to `add_loss`, on whatever stage it is. Type it again after a kill: it continues.
"""

import sys

import torch
from torch import Tensor, nn

import pipetrain

EXPERTS, WIDTH, CLASSES, BATCH = 4, 32, 8, 64


class Experts(nn.Module):
    """Each row goes to the likeliest of the experts (Fedus et al. 2022, "Switch Transformers")."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        share = self.router(rows).softmax(dim=-1)
        weight, chosen = share.max(dim=-1)
        load = nn.functional.one_hot(chosen, EXPERTS).to(share).mean(dim=0)
        pipetrain.add_loss(0.01 * EXPERTS * (load * share.mean(dim=0)).sum())
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(1)
            output = output.index_add(0, own, weight[own, None] * expert(rows[own]))
        return x + output


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), *(Experts() for _ in range(4)), nn.Linear(WIDTH, CLASSES)]


def make_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Rows [64, 32], and the class [64] of each: where the largest of its first eight numbers stands."""
    rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows, rows[:, :CLASSES].argmax(dim=1)


def train(folder: str, num_steps: int) -> list[float]:
    """The loss of each step that ran, with what the layers add."""
    losses = []
    with pipetrain.Pipeline(make_layers(), nn.functional.cross_entropy, num_microbatches=4) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        pipetrain.load(folder, pipeline, optimizer)
        while pipeline.step_index < num_steps:
            losses.append(float(pipeline.step(*make_batch(pipeline.step_index))))
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.step_index % 4 == 0:
                pipetrain.save(folder, pipeline, optimizer, keep_last=2)
            if pipeline.rank == 0:
                print(f"step {pipeline.step_index}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    train(sys.argv[1], num_steps=200)
