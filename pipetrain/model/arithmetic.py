"""Sizes, parameters and floating-point operations of the transformer, from its config alone. Without torch."""

from __future__ import annotations

import math

from pipetrain.config.records import ModelConfig
from pipetrain.model.size import ModelSize
from pipetrain.model.style import Style

Shapes = tuple[tuple[int, ...], ...]


def num_kv_heads(config: ModelConfig) -> int:
    """Key and value heads per block."""
    return config.num_heads if config.num_kv_heads is None else config.num_kv_heads


def mlp_size(config: ModelConfig) -> int:
    """Width inside the MLP.

    SwiGLU has three matrices where GELU has two, so 8/3 instead of 4 keeps the parameters equal (Shazeer, "GLU
    Variants Improve Transformer", 2020, section 2).
    """
    if config.mlp_size is not None:
        return config.mlp_size
    if config.name == Style.GPT2:
        return 4 * config.hidden_size
    return -(-8 * config.hidden_size // 24) * 8  # 8/3 of hidden_size, rounded up to a multiple of 8


def transformer_size(config: ModelConfig, vocabulary_size: int | None, sequence_length: int) -> ModelSize:
    """The layers of `transformer.py` in numbers; operations and parameters where the vocabulary is known."""
    kinds = ("embedding", *["block"] * config.num_blocks, "head")
    if vocabulary_size is None:
        return ModelSize(len(kinds), kinds, width=config.hidden_size)
    return ModelSize(
        len(kinds),
        kinds,
        flops_per_layer=tuple(forward_flops_per_layer(config, vocabulary_size, sequence_length)),
        parameters_per_layer=tuple(parameters_per_layer(config, vocabulary_size)),
        shapes_per_layer=tuple(shapes_per_layer(config, vocabulary_size)),
        width=config.hidden_size,
    )


def parameters_per_layer(config: ModelConfig, vocabulary_size: int) -> list[int]:
    """Parameters of each of the num_blocks + 2 layers, in order."""
    return [sum(map(math.prod, shapes)) for shapes in shapes_per_layer(config, vocabulary_size)]


def shapes_per_layer(config: ModelConfig, vocabulary_size: int) -> list[Shapes]:
    """The shapes of the parameters of each of the num_blocks + 2 layers, in order."""
    hidden, inner, is_gpt2 = config.hidden_size, mlp_size(config), config.name == Style.GPT2
    kv_size = hidden // config.num_heads * num_kv_heads(config)
    norm: Shapes = ((hidden,), (hidden,)) if is_gpt2 else ((hidden,),)
    words: Shapes = ((vocabulary_size, hidden),)
    positions: Shapes = ((config.max_sequence_length, hidden),) if is_gpt2 else ()
    into_attention = ((hidden, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, hidden))
    into_mlp = ((inner, hidden), (hidden, inner)) if is_gpt2 else ((inner, hidden), (inner, hidden), (hidden, inner))
    matrices: Shapes = (*into_attention, *into_mlp)
    biases: Shapes = tuple((rows,) for rows, _ in matrices) if is_gpt2 else ()
    block = (*norm, *matrices, *biases, *norm)
    return [words + positions, *[block] * config.num_blocks, norm + words]


def count_parameters(config: ModelConfig, vocabulary_size: int) -> int:
    """Parameters of the whole model."""
    return sum(parameters_per_layer(config, vocabulary_size))


def forward_flops_per_layer(config: ModelConfig, vocabulary_size: int, sequence_length: int) -> list[float]:
    """Floating-point operations of one token's forward in each layer, in order, in a sample of `sequence_length` tokens.

    Two for each weight that multiplies (the embedding is looked up, so none is there) and, in a block, 4 H Q T for the two
    products of attention: H heads of Q numbers, T tokens. The causal mask is not subtracted.
    """
    block = 2.0 * _matrices_of_block(config) + 4.0 * config.hidden_size * sequence_length
    return [0.0, *[block] * config.num_blocks, 2.0 * vocabulary_size * config.hidden_size]


def _matrices_of_block(config: ModelConfig) -> int:
    hidden = config.hidden_size
    kv_size = hidden // config.num_heads * num_kv_heads(config)
    attention = 2 * hidden * hidden + 2 * hidden * kv_size
    return attention + (2 if config.name == Style.GPT2 else 3) * hidden * mlp_size(config)
