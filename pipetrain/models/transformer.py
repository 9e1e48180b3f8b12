"""A decoder-only transformer as an ordered list of layers.

    token ids [batch, sequence]
      layer 0                 Embedding          -> [batch, sequence, hidden]
      layers 1 .. num_hidden_layers  Block              -> [batch, sequence, hidden]
      layer num_hidden_layers + 1    Head               -> logits [batch, sequence, vocabulary]

Each layer takes what the one before returned and nothing else, so any of the gaps can be the cut between two stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.loss import count_tokens, next_token_loss
from pipetrain.models.size import Style, check_model, intermediate_size, num_key_value_heads, size_of
from pipetrain.models.spec import ModelSpec, one_by_one
from pipetrain.stage.past import Past


def plain_batch(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Token ids and targets of a batch whose inputs may be a dict with a mask; a rank without the first stage gives None.

    Filling at the end of a sample needs no mask: attention looks back, and there nothing counts.
    Raises ValueError: documents side by side, or filling in front, which these models would take for what came before.
    """
    if not isinstance(inputs, Mapping):
        return inputs, targets
    if inputs.get("position_ids") is not None:
        raise ValueError(
            "data.layout=packed (that of chats where nothing else is said): in the built-in models the documents of a sample would see each "
            "other; use data.layout=padded, or model=hf"
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask: the built-in models take samples that are filled up at their end alone; use model=hf"
        )
    return inputs["input_ids"], targets


# Keys of `model` that change no number of it (dtype belongs to `precision`), or are for models of others.
NOT_OF_THE_MODEL = {"path", "revision", "weights", "dtype", "attention", "lora", "compile"}
NOT_OF_THE_MODEL |= {"target", "args", "loss", "loss_args", "count", "count_args", "file_sha256"}


def transformer_spec(config: ModelConfig, vocabulary_size: int) -> ModelSpec:
    """The decoder-only transformer that `config` describes, trained to tell the next token.

    `vocabulary_size` is the tokenizer's; `model.vocab_size` wins where it is set. Raises ValueError for a config of no model.
    """
    layers = transformer_layers(config, vocabulary_size)
    return ModelSpec(
        size=size_of(config, vocabulary_size=vocabulary_size),
        build_layers=one_by_one(layers),
        loss_fn=next_token_loss,
        count_fn=count_tokens,
        take_batch=plain_batch,
        fingerprint={
            **{key: value for key, value in asdict(config).items() if key not in NOT_OF_THE_MODEL},
            "vocab_size": config.vocab_size or vocabulary_size,
            "num_key_value_heads": num_key_value_heads(config),
            "intermediate_size": intermediate_size(config),
        },
    )


def transformer_layers(config: ModelConfig, vocabulary_size: int) -> list[Callable[[], nn.Module]]:
    """The num_hidden_layers + 2 layers, each as a function that builds it: a rank calls those of its own stage.

    `vocabulary_size` is the tokenizer's; `model.vocab_size` wins where it is set. Raises ValueError for a config of no model.
    """
    check_model(config, vocabulary_size=vocabulary_size)
    size = config.vocab_size or vocabulary_size
    blocks = [partial(Block, config)] * config.num_hidden_layers
    return [partial(Embedding, config, size), *blocks, partial(Head, config, size)]


class Embedding(nn.Module):
    """Token ids `[batch, sequence]`, int64 -> `[batch, sequence, hidden]`; gpt2: plus a learned vector for each position."""

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = embedding(vocabulary_size, config.hidden_size)
        learned = config.name == Style.GPT2
        self.positions = embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.max_position_embeddings = config.max_position_embeddings

    def forward(self, ids: Tensor, past: Past | None = None) -> Tensor:
        """With a `past`: of the new positions."""
        length = ids.shape[1] if past is None else past.longest
        if length > self.max_position_embeddings:
            raise ValueError(
                f"a sample has {length} tokens, more than model.max_position_embeddings={self.max_position_embeddings}: "
                f"set model.max_position_embeddings={length}, or cut the samples"
            )
        hidden: Tensor = self.tokens(ids)
        if self.positions is not None:
            positions = torch.arange(length, device=ids.device) if past is None else past.positions
            hidden = hidden + self.positions(positions)
        dropped: Tensor = self.dropout(hidden)
        return dropped

    forward_cached = forward


class Block(nn.Module):
    """`[batch, sequence, hidden]` to the same: attention, then an MLP, each normed before and added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, past: Past | None = None) -> Tensor:
        """With a `past`: of the new positions."""
        attended = hidden + self.dropout(self.attention(self.attention_norm(hidden), past))
        output: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return output

    forward_cached = forward


class Head(nn.Module):
    """`[batch, sequence, hidden]` -> logits `[batch, sequence, vocabulary]`; its weights are its own, not the embedding's."""

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.logits = linear(config.hidden_size, vocabulary_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(hidden))
        return logits

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:  # noqa: ARG002
        """The logits of the last position alone, `[batch, 1, vocabulary]`."""
        logits: Tensor = self(hidden[:, -1:])
        return logits


def _norm(config: ModelConfig) -> nn.Module:
    norm = nn.LayerNorm if config.name == Style.GPT2 else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_epsilon)


class Attention(nn.Module):
    """`[batch, sequence, hidden] -> [batch, sequence, hidden]`; a position sees itself and those before it.

    With fewer key and value heads than query heads, consecutive query heads share one (Ainslie et al., "GQA", 2023).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, biased = config.hidden_size, config.name == Style.GPT2
        self.head_size = hidden // config.num_attention_heads
        self.grouped = num_key_value_heads(config) != config.num_attention_heads
        self.rope_theta = None if config.name == Style.GPT2 else config.rope_theta
        kv_size = self.head_size * num_key_value_heads(config)
        self.query = linear(hidden, hidden, bias=biased)
        self.key = linear(hidden, kv_size, bias=biased)
        self.value = linear(hidden, kv_size, bias=biased)
        self.output = linear(hidden, hidden, bias=biased, std=residual_std(config.num_hidden_layers))

    def forward(self, hidden: Tensor, past: Past | None = None) -> Tensor:
        """With a `past`: of the new positions, which see those before, too."""
        query, key, value = (self._split_heads(project(hidden)) for project in (self.query, self.key, self.value))
        if self.rope_theta is not None:
            cosines, sines = self._tables(hidden, past)
            query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        visible, is_causal = None, True
        if past is not None:
            is_causal = past.length == 0 and past.mask is None  # samples begin here: a position sees those before it
            visible = None if is_causal else past.once(_visible, lambda: _visible(past))
            key, value = past.extend(self, key, value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=is_causal, enable_gqa=self.grouped
        )
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _tables(self, hidden: Tensor, past: Past | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the positions of `hidden`; with a `past` `[rows, 1, new, head_size / 2]`, for all heads.

        Made anew in each forward: a table kept in the module would follow it into bfloat16, in which neighbouring positions beyond 256
        are one.
        """
        base = self.rope_theta
        assert base is not None
        if past is None:
            return rotary_tables(torch.arange(hidden.shape[1], device=hidden.device), self.head_size, base)
        key = (rotary_tables, self.head_size, base)
        return past.once(key, lambda: rotary_tables(past.positions[:, None], self.head_size, base))

    def _split_heads(self, flat: Tensor) -> Tensor:
        """`[batch, sequence, heads x head_size] -> [batch, heads, sequence, head_size]`."""
        return flat.reshape(*flat.shape[:2], -1, self.head_size).transpose(1, 2)


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


def rotary_tables(positions: Tensor, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., head_size / 2]`, float32, of positions `[...]`: pair i turns by `position x base ** (-2 i / head_size)`.

    So the product of a query and a key depends on their distance alone (Su et al., "RoFormer", 2021, section 3.2).
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions.float()[..., None] * base**-exponents
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn `[..., sequence, head_size]` by its positions; number i is paired with number i + head_size / 2, as Llama's weights are saved."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(heads.dtype)


class MLP(nn.Module):
    """llama: `down(silu(gate(x)) * up(x))` without biases (Shazeer, "GLU Variants Improve Transformer", 2020, section 2).

    gpt2: `down(gelu(up(x)))` with biases and the tanh form of GELU.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, is_gpt2 = config.hidden_size, intermediate_size(config), config.name == Style.GPT2
        self.gate = None if is_gpt2 else linear(hidden, inner, bias=False)
        self.up = linear(hidden, inner, bias=is_gpt2)
        self.down = linear(inner, hidden, bias=is_gpt2, std=residual_std(config.num_hidden_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self.up(hidden), approximate="tanh")
        else:
            inner = F.silu(self.gate(hidden)) * self.up(hidden)
        projected: Tensor = self.down(inner)
        return projected


WEIGHT_STD = 0.02  # Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, and their code


def residual_std(num_hidden_layers: int) -> float:
    """Standard deviation for weights whose output is added to the residual stream (two per block).

    The stream sums 2 x num_hidden_layers of them; dividing by the root keeps its variance the same at any depth (the same, section 2.3).
    """
    return WEIGHT_STD / math.sqrt(2 * num_hidden_layers)


def linear(num_in: int, num_out: int, *, bias: bool, std: float = WEIGHT_STD) -> nn.Linear:
    """A linear layer `[..., num_in] -> [..., num_out]`, weights normal with `std`, biases zero.

    They are drawn from torch's global generator and nothing else: whoever seeds it before a layer is built decides that layer's weights.
    """
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
