"""Causal self-attention, with grouped queries and rotary positions where the config asks for them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.model.arithmetic import num_kv_heads
from pipetrain.model.linear import linear, residual_std
from pipetrain.model.rotary import rotary_tables, rotate
from pipetrain.model.style import Style


class Attention(nn.Module):
    """`[batch, sequence, hidden] -> [batch, sequence, hidden]`; a position sees itself and those before it.

    With fewer key and value heads than query heads, consecutive query heads share one (Ainslie et al., "GQA", 2023).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, biased = config.hidden_size, config.name == Style.GPT2
        self.head_size = hidden // config.num_heads
        self.grouped = num_kv_heads(config) != config.num_heads
        self.rope_base = None if config.name == Style.GPT2 else config.rope_base
        kv_size = self.head_size * num_kv_heads(config)
        self.query = linear(hidden, hidden, bias=biased)
        self.key = linear(hidden, kv_size, bias=biased)
        self.value = linear(hidden, kv_size, bias=biased)
        self.output = linear(hidden, hidden, bias=biased, std=residual_std(config.num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (self._split_heads(project(hidden)) for project in (self.query, self.key, self.value))
        if self.rope_base is not None:
            tables = rotary_tables(hidden.shape[1], self.head_size, self.rope_base, hidden.device)
            query, key = rotate(query, *tables), rotate(key, *tables)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split_heads(self, flat: Tensor) -> Tensor:
        """`[batch, sequence, heads x head_size] -> [batch, heads, sequence, head_size]`."""
        return flat.reshape(*flat.shape[:2], -1, self.head_size).transpose(1, 2)
