"""An entry of the zoo: something that is trained, what is to come of it, and the frame of plain layers around a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.verify.beside_loop import Batch, Subject, Verdict

WIDTH = 16
NUM_ROWS = 7  # over 3 microbatches: 3, 2 and 2 rows
VOCABULARY = 11

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Entry:
    """`expected` of all ways together, with `says` in the refusal (or in what differs, where that is documented).

    `block` makes one layer from `[rows, WIDTH]` to the same, where the entry has such a layer: others are built from it.
    `stages` are the numbers of stages to try. `slow`: takes some seconds. `lacks` says what this machine has not that the entry
    needs.
    """

    name: str
    subject: Subject
    expected: Verdict = Verdict.EQUAL
    says: str = ""
    block: Make | None = None
    stages: Sequence[int] = (1, 2, 3, 4)
    on_ranks: bool = True  # also with a stage on each of two ranks
    slow: bool = False
    lacks: Callable[[], str] = lambda: ""

    @property
    def is_documented(self) -> bool:
        """Whether it is known to differ."""
        return self.expected is Verdict.DIFFERS


def rows(step: int) -> Batch:
    """`[rows, WIDTH]` twice, others in each step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_ROWS, WIDTH, generator=generator), torch.randn(NUM_ROWS, WIDTH, generator=generator)


def tokens(step: int) -> Batch:
    """Token ids `[rows, 4]`, and `[rows, WIDTH]`."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (NUM_ROWS, 4), generator=generator)
    return ids, torch.randn(NUM_ROWS, WIDTH, generator=generator)


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def dense() -> nn.Module:
    return nn.Sequential(square(), nn.Tanh())


def stack(
    name: str, layers: Callable[[], Sequence[nn.Module]], expected: Verdict = Verdict.EQUAL, says: str = "", **more: Any
) -> Entry:
    """An entry with layers of its own, at least four."""
    options = {key: more.pop(key) for key in list(more) if key in Subject.__dataclass_fields__}
    batch = options.pop("batch", rows)
    return Entry(name, Subject(layers, batch, **options), expected, says, **more)


def block(name: str, make: Make, expected: Verdict = Verdict.EQUAL, says: str = "", **more: Any) -> Entry:
    """An entry in which the layer stands twice between plain ones: in the middle of a stage, at its ends, and alone."""
    entry = stack(name, lambda: [square(), make(), dense(), make(), square()], expected, says, **more)
    return replace(entry, block=make)


class Shaped(nn.Module):
    """`[rows, WIDTH]` as rows of `shape`, through `inner`, and back; `features` are what it gives per row."""

    def __init__(self, inner: nn.Module, *shape: int, features: int = WIDTH) -> None:
        super().__init__()
        self.inner = inner
        self.shape = shape
        self.back = nn.Linear(features, WIDTH) if features != WIDTH else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.back(self.inner(x.reshape(x.shape[0], *self.shape)).flatten(1))
