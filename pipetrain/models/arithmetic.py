"""The transformer's config: what it must satisfy, and the sizes, parameters and floating-point operations that follow from it. Without torch."""

from __future__ import annotations

import math
from enum import StrEnum

from pipetrain.config.records import ModelConfig
from pipetrain.models.size import ModelSize

Shapes = tuple[tuple[int, ...], ...]


class Style(StrEnum):
    """The kinds of transformer block."""

    LLAMA = "llama"
    GPT2 = "gpt2"


def num_key_value_heads(config: ModelConfig) -> int:
    """Key and value heads per block."""
    return config.num_attention_heads if config.num_key_value_heads is None else config.num_key_value_heads


def intermediate_size(config: ModelConfig) -> int:
    """Width inside the MLP.

    SwiGLU has three matrices where GELU has two, so 8/3 instead of 4 keeps the parameters equal (Shazeer, "GLU
    Variants Improve Transformer", 2020, section 2).
    """
    if config.intermediate_size is not None:
        return config.intermediate_size
    if config.name == Style.GPT2:
        return 4 * config.hidden_size
    return -(-8 * config.hidden_size // 24) * 8  # 8/3 of hidden_size, rounded up to a multiple of 8


def transformer_size(config: ModelConfig, vocabulary_size: int | None, sequence_length: int) -> ModelSize:
    """The layers of `transformer.py` in numbers; operations and parameters where the vocabulary is known."""
    kinds = ("embedding", *["block"] * config.num_hidden_layers, "head")
    if vocabulary_size is None:
        return ModelSize(len(kinds), kinds, width=config.hidden_size)
    shapes = shapes_per_layer(config, vocabulary_size)
    # Two for each weight that multiplies (the embedding is looked up, so none is there) and, in a block, 4 H Q T for the two products of
    # attention: H heads of Q numbers, T tokens. The causal mask is not subtracted.
    weights = sum(math.prod(shape) for shape in shapes[1] if len(shape) == 2)
    block = 2.0 * weights + 4.0 * config.hidden_size * sequence_length
    return ModelSize(
        len(kinds),
        kinds,
        flops_per_layer=(0.0, *[block] * config.num_hidden_layers, 2.0 * vocabulary_size * config.hidden_size),
        parameters_per_layer=tuple(sum(map(math.prod, layer)) for layer in shapes),
        shapes_per_layer=tuple(shapes),
        width=config.hidden_size,
    )


def shapes_per_layer(config: ModelConfig, vocabulary_size: int) -> list[Shapes]:
    """The shapes of the parameters of each of the num_hidden_layers + 2 layers, in order."""
    hidden, inner, is_gpt2 = config.hidden_size, intermediate_size(config), config.name == Style.GPT2
    kv_size = hidden // config.num_attention_heads * num_key_value_heads(config)
    norm: Shapes = ((hidden,), (hidden,)) if is_gpt2 else ((hidden,),)
    words: Shapes = ((vocabulary_size, hidden),)
    positions: Shapes = ((config.max_position_embeddings, hidden),) if is_gpt2 else ()
    into_attention = ((hidden, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, hidden))
    into_mlp = ((inner, hidden), (hidden, inner)) if is_gpt2 else ((inner, hidden), (inner, hidden), (hidden, inner))
    matrices: Shapes = (*into_attention, *into_mlp)
    biases: Shapes = tuple((rows,) for rows, _ in matrices) if is_gpt2 else ()
    block = (*norm, *matrices, *biases, *norm)
    return [words + positions, *[block] * config.num_hidden_layers, norm + words]


def longest_sample(config: ModelConfig) -> int:
    """Tokens of the longest sample that a model of these keys takes."""
    return config.max_position_embeddings


def check_heads(config: ModelConfig) -> None:
    """Raise ValueError, with the key and what to type next, where the heads of a transformer do not fit its width.

    Keys of model=hf are refused too: nothing would read them.
    """
    for key, value in (
        ("path", config.path),
        ("revision", config.revision),
        ("attention", config.attention),
        ("lora.rank", config.lora.rank),
    ):
        if value is not None:
            raise ValueError(
                f"model.{key}={value}: is of model=hf, and model.name={config.name} is built from the keys of `model` (model=llama, "
                f"model=gpt2): type model.{key}=null, or model=hf"
            )
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise ValueError(
            f"model.num_attention_heads={heads} does not divide model.hidden_size={hidden}: "
            f"set model.num_attention_heads={_nearest_divisor(hidden, heads)}, or hidden_size to a multiple of {heads}"
        )
    if config.num_key_value_heads is not None and heads % config.num_key_value_heads:
        raise ValueError(
            f"model.num_key_value_heads={config.num_key_value_heads} does not divide model.num_attention_heads={heads}: "
            f"set model.num_key_value_heads={_nearest_divisor(heads, config.num_key_value_heads)}, or leave it out"
        )
    if config.name == Style.GPT2 and config.num_key_value_heads not in (None, heads):
        raise ValueError(
            f"model.num_key_value_heads={config.num_key_value_heads}: gpt2 blocks have no grouped queries; leave it out, or set model.name=llama"
        )
    if config.name == Style.LLAMA and (hidden // heads) % 2:
        raise ValueError(
            f"model.hidden_size={hidden} over model.num_attention_heads={heads} makes heads of {hidden // heads}: rotary positions "
            f"turn pairs and need an even size; set model.hidden_size={2 * heads * max(1, hidden // heads // 2)}"
        )


def _nearest_divisor(number: int, near: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))
