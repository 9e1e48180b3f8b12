"""A decoder-only transformer as an ordered list of layers.

    token ids [batch, sequence]
      layer 0                 Embedding          -> [batch, sequence, hidden]
      layers 1 .. num_blocks  Block              -> [batch, sequence, hidden]
      layer num_blocks + 1    Head               -> logits [batch, sequence, vocabulary]

Each layer takes what the one before returned and nothing else, so any of the gaps can be the cut between two stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.model.arithmetic import mlp_size, num_kv_heads
from pipetrain.model.attention import Attention
from pipetrain.model.linear import embedding, linear
from pipetrain.model.loss import count_tokens, next_token_loss
from pipetrain.model.mlp import GeluMLP, SwiGLU
from pipetrain.model.plain_batch import plain_batch
from pipetrain.model.size import size_of
from pipetrain.model.spec import ModelSpec, one_by_one
from pipetrain.model.style import Style, check_model
from pipetrain.stage.past import Past

# Keys of `model` that change no number of it (dtype belongs to `precision`), or are for models of others.
NOT_OF_THE_MODEL = {"path", "revision", "weights", "dtype", "attention", "lora", "compile"}


def transformer_spec(config: ModelConfig, vocabulary_size: int) -> ModelSpec:
    """The decoder-only transformer that `config` describes, trained to tell the next token.

    `vocabulary_size` is the tokenizer's; `model.vocabulary_size` wins where it is set. Raises ValueError for a config of no model.
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
            "vocabulary_size": config.vocabulary_size or vocabulary_size,
            "num_kv_heads": num_kv_heads(config),
            "mlp_size": mlp_size(config),
        },
    )


def transformer_layers(config: ModelConfig, vocabulary_size: int) -> list[Callable[[], nn.Module]]:
    """The num_blocks + 2 layers, each as a function that builds it: a rank calls those of its own stage.

    `vocabulary_size` is the tokenizer's; `model.vocabulary_size` wins where it is set. Raises ValueError for a config of no model.
    """
    check_model(config, vocabulary_size=vocabulary_size)
    size = config.vocabulary_size or vocabulary_size
    blocks = [partial(Block, config)] * config.num_blocks
    return [partial(Embedding, config, size), *blocks, partial(Head, config, size)]


class Embedding(nn.Module):
    """Token ids `[batch, sequence]`, int64 -> `[batch, sequence, hidden]`; gpt2: plus a learned vector for each position."""

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = embedding(vocabulary_size, config.hidden_size)
        learned = config.name == Style.GPT2
        self.positions = embedding(config.max_sequence_length, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.max_sequence_length = config.max_sequence_length

    def forward(self, ids: Tensor) -> Tensor:
        self._check_length(ids.shape[1])
        hidden: Tensor = self.tokens(ids)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(ids.shape[1], device=ids.device))
        dropped: Tensor = self.dropout(hidden)
        return dropped

    def forward_cached(self, ids: Tensor, past: Past) -> Tensor:
        """The same for the new positions."""
        self._check_length(past.longest)
        hidden: Tensor = self.tokens(ids)
        return hidden if self.positions is None else hidden + self.positions(past.positions)

    def _check_length(self, length: int) -> None:
        if length > self.max_sequence_length:
            raise ValueError(
                f"a sample has {length} tokens, more than model.max_sequence_length={self.max_sequence_length}: "
                f"set model.max_sequence_length={length}, or cut the samples"
            )


class Block(nn.Module):
    """`[batch, sequence, hidden]` to the same: attention, then an MLP, each normed before and added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = GeluMLP(config) if config.name == Style.GPT2 else SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        output: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return output

    def prepare_cached(self, past: Past) -> None:
        """Masks and tables of the new positions."""
        self.attention.prepare_cached(past)

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:
        """The same for the new positions."""
        attended = hidden + self.attention.forward_cached(self.attention_norm(hidden), past)
        output: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output


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
