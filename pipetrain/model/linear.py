"""Linear layers with the initial weights of GPT-2.

Weights are drawn in the constructor, from torch's global generator and nothing else: whoever seeds it before a layer is built
decides that layer's weights, whichever rank builds it.
"""

from __future__ import annotations

import math

from torch import nn

WEIGHT_STD = 0.02  # Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, and their code


def residual_std(num_blocks: int) -> float:
    """Standard deviation for weights whose output is added to the residual stream (two per block).

    The stream sums 2 x num_blocks of them; dividing by the root keeps its variance the same at any depth (the same, section 2.3).
    """
    return WEIGHT_STD / math.sqrt(2 * num_blocks)


def linear(num_in: int, num_out: int, *, bias: bool, std: float = WEIGHT_STD) -> nn.Linear:
    """A linear layer `[..., num_in] -> [..., num_out]`, weights normal with `std`, biases zero."""
    layer = nn.Linear(num_in, num_out, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def embedding(num_rows: int, hidden_size: int) -> nn.Embedding:
    """A table `[num_rows, hidden_size]`, normal."""
    table = nn.Embedding(num_rows, hidden_size)
    nn.init.normal_(table.weight, std=WEIGHT_STD)
    return table
