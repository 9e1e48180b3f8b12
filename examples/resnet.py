"""A ResNet with BatchNorm learns to tell stripes apart: `torchrun --nproc-per-node=2 examples/resnet.py runs/resnet`.

Type it again after a kill, on any number of ranks: it continues from its newest snapshot. BatchNorm normalizes each microbatch by itself.
"""

import math
import sys

import torch
from torch import Tensor, nn

import pipetrain

CLASSES, SIZE, BATCH = 4, 16, 32


class Block(nn.Module):
    """Two convolutions and a shortcut around them (He et al. 2016)."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        stride = wider // channels
        self.way = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, padding=1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.shortcut = nn.Identity() if wider == channels else nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.way(x) + self.shortcut(x))


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(Block(8, 8), Block(8, 16), Block(16, 16), Block(16, 32)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
    ]


def make_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Images [32, 1, 16, 16] of stripes in noise, and the number [32] of their direction."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    angle = (labels * math.pi / CLASSES)[:, None, None]
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.sin(rows * angle.cos() + columns * angle.sin())
    return (stripes + torch.randn(stripes.shape, generator=generator))[:, None], labels


def train(folder: str, num_steps: int) -> list[float]:
    """The loss of each step that ran."""
    losses = []
    with pipetrain.Pipeline(make_layers(), nn.functional.cross_entropy, num_microbatches=4) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
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
    train(sys.argv[1], num_steps=60)
