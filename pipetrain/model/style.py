"""What a model config must satisfy. Without torch, so that a mistake is told before any process starts."""

from __future__ import annotations

from enum import StrEnum

from pipetrain.config.records import ModelConfig
from pipetrain.config.schema import check_limits
from pipetrain.model.registry import family_of, load_function


class Style(StrEnum):
    """The kinds of transformer block."""

    LLAMA = "llama"
    GPT2 = "gpt2"


def check_model(config: ModelConfig, *, vocabulary_size: int | None = None, sequence_length: int | None = None) -> None:
    """Raise ValueError, with the key and what to type next, where `config` describes no model.

    `vocabulary_size` is the tokenizer's, `sequence_length` the data's; None: not compared.
    """
    family = family_of(config)
    check_limits(config, "model.")
    load_function(family.check)(config)
    longest: int | None = load_function(family.longest)(config)
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise ValueError(_too_long(config, sequence_length, longest))
    size = config.vocabulary_size
    if size is not None and vocabulary_size is not None and size < vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {vocabulary_size}: "
            f"leave it out, or set model.vocabulary_size={vocabulary_size} or more"
        )


def _too_long(config: ModelConfig, sequence_length: int, longest: int) -> str:
    if config.path is not None:
        return (
            f"data.sequence_length={sequence_length} is longer than the {longest} positions that model.path={config.path} was made for: set "
            f"data.sequence_length={longest} or less"
        )
    return (
        f"data.sequence_length={sequence_length} is longer than model.max_sequence_length="
        f"{longest}: set model.max_sequence_length={sequence_length}, or shorter samples"
    )


def longest_sample(config: ModelConfig) -> int:
    """Tokens of the longest sample that a model of these keys takes."""
    return config.max_sequence_length


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
    hidden, heads = config.hidden_size, config.num_heads
    if hidden % heads:
        raise ValueError(
            f"model.num_heads={heads} does not divide model.hidden_size={hidden}: "
            f"set model.num_heads={_nearest_divisor(hidden, heads)}, or hidden_size to a multiple of {heads}"
        )
    if config.num_kv_heads is not None and heads % config.num_kv_heads:
        raise ValueError(
            f"model.num_kv_heads={config.num_kv_heads} does not divide model.num_heads={heads}: "
            f"set model.num_kv_heads={_nearest_divisor(heads, config.num_kv_heads)}, or leave it out"
        )
    if config.name == Style.GPT2 and config.num_kv_heads not in (None, heads):
        raise ValueError(
            f"model.num_kv_heads={config.num_kv_heads}: gpt2 blocks have no grouped queries; leave it out, or set model.name=llama"
        )
    if config.name == Style.LLAMA and (hidden // heads) % 2:
        raise ValueError(
            f"model.hidden_size={hidden} over model.num_heads={heads} makes heads of {hidden // heads}: rotary positions "
            f"turn pairs and need an even size; set model.hidden_size={2 * heads * max(1, hidden // heads // 2)}"
        )


def _nearest_divisor(number: int, near: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))
