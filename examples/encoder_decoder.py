"""An encoder and a decoder learn to reverse a row of symbols: `torchrun --nproc-per-node=2 examples/encoder_decoder.py runs/reverse`.

Each layer takes and returns a tuple, which crosses the boundary between stages as it is. Type it again after a kill: it continues.
"""

import sys

import torch
from torch import Tensor, nn

import pipetrain

SYMBOLS, LENGTH, WIDTH, BATCH = 12, 6, 32, 32
START = SYMBOLS  # what the decoder reads first
Pair = tuple[Tensor, Tensor]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, both: Pair) -> Pair:
        places = self.places.weight
        return self.symbols(both[0]) + places, self.symbols(both[1]) + places


class Encode(nn.TransformerEncoderLayer):
    """Changes the source, and hands on the target."""

    def forward(self, both: Pair) -> Pair:
        return super().forward(both[0]), both[1]


class Decode(nn.TransformerDecoderLayer):
    """Changes the target, of which each place sees those before it, and hands on the source."""

    def forward(self, both: Pair) -> Pair:
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=both[1].device).triu(1)
        return both[0], super().forward(both[1], both[0], tgt_mask=later)


class Head(nn.Linear):
    def forward(self, both: Pair) -> Tensor:
        return super().forward(both[1]).transpose(1, 2)  # [rows, symbols, places], as cross_entropy wants it


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    encoder, decoder = ([kind(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(2)] for kind in (Encode, Decode))
    return [Embed(), *encoder, *decoder, Head(WIDTH, SYMBOLS)]


def make_batch(step: int = 0) -> tuple[Pair, Tensor]:
    """Inputs ([32, 6], [32, 6]), what to reverse and the answer so far; targets [32, 6], the answer."""
    source = torch.randint(SYMBOLS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    answer = source.flip(1)
    return (source, torch.cat([torch.full((BATCH, 1), START), answer[:, :-1]], dim=1)), answer


def train(folder: str, num_steps: int) -> list[float]:
    """The loss of each step that ran."""
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
