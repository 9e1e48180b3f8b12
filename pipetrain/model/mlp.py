"""The two feed-forward networks: `[batch, sequence, hidden] -> [batch, sequence, hidden]`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.model.arithmetic import mlp_size
from pipetrain.model.linear import linear, residual_std


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020, section 2), without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, mlp_size(config)
        self.gate = linear(hidden, inner, bias=False)
        self.up = linear(hidden, inner, bias=False)
        self.down = linear(inner, hidden, bias=False, std=residual_std(config.num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return projected


class GeluMLP(nn.Module):
    """`down(gelu(up(x)))` with biases and the tanh form of GELU, as GPT-2 has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, mlp_size(config)
        self.up = linear(hidden, inner, bias=True)
        self.down = linear(inner, hidden, bias=True, std=residual_std(config.num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return projected
