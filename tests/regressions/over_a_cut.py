"""Layers whose output crosses the cut between two stages, and how to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from beside_the_loop import ALWAYS
from torch import Tensor, nn


class Then(nn.Module):
    """Tanh and a linear layer of 8 columns on `pick(input)`; gives `function(what it got, its own output)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], pick: Callable[[Any], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.pick = pick

    def forward(self, x: Any) -> Any:
        return self.function(
            x, self.linear(torch.tanh(self.pick(x)))
        )  # saves no output, which may then be changed in place


def only(x: Any, y: Tensor) -> Tensor:
    return y


MODES: tuple[Any, ...] = ("never", ALWAYS)
THREE_OVER_A_CUT: dict[str, Any] = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 3}
