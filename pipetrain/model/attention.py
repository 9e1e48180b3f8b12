"""Causal self-attention, with grouped queries and rotary positions where the config asks for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.model.arithmetic import num_kv_heads
from pipetrain.model.linear import linear, residual_std
from pipetrain.model.rotary import rotary_tables, rotary_tables_at, rotate
from pipetrain.model.style import Style
from pipetrain.stage.past import Past


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
        query, key, value = self._heads(hidden)
        if self.rope_base is not None:
            tables = rotary_tables(hidden.shape[1], self.head_size, self.rope_base, hidden.device)
            query, key = rotate(query, *tables), rotate(key, *tables)
        return self._mixed(query, key, value, None, is_causal=True)

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:
        """The same for the new positions, which see those before."""
        query, key, value = self._heads(hidden)
        tables, visible = self.prepare_cached(past)
        if tables is not None:
            query, key = rotate(query, *tables), rotate(key, *tables)
        keys, values = past.extend(self, key, value)
        return self._mixed(query, keys, values, visible, is_causal=_is_causal(past))

    def prepare_cached(self, past: Past) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """The rotary tables of the new positions, and which keys they see; None: no tables, all keys or those before."""
        tables = None
        if self.rope_base is not None:
            tables = past.once((rotary_tables_at, self.head_size, self.rope_base), lambda: self._tables(past))
        return tables, None if _is_causal(past) else past.once(_visible, lambda: _visible(past))

    def _tables(self, past: Past) -> tuple[Tensor, Tensor]:
        """Cosines and sines for all heads, `[rows, 1, new, head_size / 2]`."""
        assert self.rope_base is not None
        return rotary_tables_at(past.positions[:, None], self.head_size, self.rope_base)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, *, is_causal: bool) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=is_causal, enable_gqa=self.grouped
        )
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return (
            self._split_heads(self.query(hidden)),
            self._split_heads(self.key(hidden)),
            self._split_heads(self.value(hidden)),
        )

    def _split_heads(self, flat: Tensor) -> Tensor:
        """`[batch, sequence, heads x head_size] -> [batch, heads, sequence, head_size]`."""
        return flat.reshape(*flat.shape[:2], -1, self.head_size).transpose(1, 2)


def _is_causal(past: Past) -> bool:
    """Whether every sample begins here, so that a position sees those before it."""
    return past.length == 0 and past.mask is None


def _visible(past: Past) -> Tensor | None:
    """Which keys each new position sees, `[rows or 1, 1, new, length + new]`, bool; None: all of them.

    Padding sees itself, for the softmax of nothing is not a number, and what is not a number in a value stays so with weight 0.
    """
    padded = past.mask
    if padded is None and past.new == 1:
        return None
    keys = torch.arange(past.length + past.new, device=past.device)
    own = keys[past.length :, None]
    causal = keys <= own
    if padded is None:
        return causal[None, None]
    return (causal & padded[:, None, None]) | (keys == own)
