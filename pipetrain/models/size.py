"""The families of `model.name`; what a model's config must satisfy, and how large it is. Without torch: known before any process starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pkgutil import resolve_name

from pipetrain.config.problem import choice_error
from pipetrain.config.records import PYTHON, ModelConfig
from pipetrain.config.schema import check_limits


@dataclass(frozen=True)
class ModelFamily:
    """Where a family's functions are, each as `module:function`: a login node plans and has no torch, so each is loaded when it is used.

    check: `(ModelConfig) -> None` raises ValueError where the config describes no model of the family; without torch; None: any does.
    size: `(ModelConfig, vocabulary_size or None, sequence_length) -> ModelSize`; without torch, of a config that was checked.
    spec: `(ModelConfig, vocabulary_size) -> ModelSpec`.
    longest: `(ModelConfig) -> tokens of the longest sample`, or None where it is not known; without torch, of a config that was checked.
    """

    size: str
    spec: str
    check: str | None = None
    longest: str | None = "pipetrain.models.size:longest_sample"

    def longest_of(self, config: ModelConfig) -> int | None:
        """Tokens of the longest sample that the model of this config takes, where that is known."""
        return None if self.longest is None else resolve_name(self.longest)(config)


_TRANSFORMER = ModelFamily(
    check="pipetrain.models.size:check_heads",
    size="pipetrain.models.size:transformer_size",
    spec="pipetrain.models.transformer:transformer_spec",
)
_HUGGING_FACE = ModelFamily(
    check="pipetrain.models.hf.hf_size:check_hf",
    size="pipetrain.models.hf.hf_size:hf_size",
    spec="pipetrain.models.hf.hf_spec:hf_spec",
    longest="pipetrain.models.hf.hf_size:longest_hf_sample",
)
_OWN = ModelFamily(size="pipetrain.models.own_size:own_size", spec="pipetrain.models.own:own_spec", longest=None)
MODEL_FAMILIES = {"llama": _TRANSFORMER, "gpt2": _TRANSFORMER, "hf": _HUGGING_FACE, PYTHON: _OWN}


def family_of(config: ModelConfig) -> ModelFamily:
    """The row of `model.name`. Raises ValueError: there is none."""
    if config.name not in MODEL_FAMILIES:
        raise choice_error("model.name", config.name, MODEL_FAMILIES)
    return MODEL_FAMILIES[config.name]


def check_model(config: ModelConfig, *, vocabulary_size: int | None = None, sequence_length: int | None = None) -> None:
    """Raise ValueError, with the key and what to type next, where `config` describes no model.

    `vocabulary_size` is the tokenizer's, `sequence_length` the data's; None: not compared.
    """
    family = family_of(config)
    check_limits(config, "model.")
    if family.check is not None:
        resolve_name(family.check)(config)
    longest = family.longest_of(config)
    if sequence_length is not None and longest is not None and sequence_length > longest:
        if config.path is not None:
            raise ValueError(
                f"data.sequence_length={sequence_length} is longer than the {longest} positions that model.path={config.path} was made for: set "
                f"data.sequence_length={longest} or less"
            )
        raise ValueError(
            f"data.sequence_length={sequence_length} is longer than model.max_position_embeddings="
            f"{longest}: set model.max_position_embeddings={sequence_length}, or shorter samples"
        )
    size = config.vocab_size
    if size is not None and vocabulary_size is not None and size < vocabulary_size:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the tokenizer's {vocabulary_size}: "
            f"leave it out, or set model.vocab_size={vocabulary_size} or more"
        )


@dataclass(frozen=True)
class ModelSize:
    """The layers of a model in numbers, an entry per layer, in order. What is not known is None.

    kinds: layers of one kind (`block`) do the same work; a layer like no other has a kind of its own.
    tied: pairs of layers (lower, higher) that share a parameter, as a head its embedding's.
    flops_per_layer: floating-point operations of one token's forward; a multiplication with its addition are two.
    shapes_per_layer: of each parameter of the layer. width: numbers of a token that go from one layer to the next.
    """

    num_layers: int
    kinds: tuple[str, ...] | None = None
    flops_per_layer: tuple[float, ...] | None = None
    parameters_per_layer: tuple[int, ...] | None = None
    tied: tuple[tuple[int, int], ...] = ()
    shapes_per_layer: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    width: int | None = None

    @property
    def flops_per_token(self) -> float | None:
        """Floating-point operations of forward and backward, per token.

        A backward takes two forwards (`6 N + 12 L H Q T` of PaLM, Chowdhery et al., 2022, appendix B). What is recomputed is not added:
        what is divided by this is model FLOPs utilisation.
        """
        return None if self.flops_per_layer is None else 3.0 * sum(self.flops_per_layer)

    def __post_init__(self) -> None:
        for name in ("kinds", "flops_per_layer", "parameters_per_layer", "shapes_per_layer"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_layers:
                raise ValueError(f"{name} has {len(entries)} entries for {self.num_layers} layers: give one per layer")


def size_of(
    config: ModelConfig, *, vocabulary_size: int | None = None, sequence_length: int | None = None
) -> ModelSize:
    """The size of the model that `config` describes.

    `vocabulary_size` is the tokenizer's; `model.vocab_size` wins where it is set, and where neither is, operations and parameters
    are not known. `sequence_length`: tokens of a sample, on which attention depends; None: the longest that the model takes.
    Raises ValueError: `config` describes no model, or none that takes samples so long.
    """
    check_model(config, sequence_length=sequence_length)
    family = family_of(config)
    length = sequence_length or family.longest_of(config) or config.max_position_embeddings
    size: ModelSize = resolve_name(family.size)(config, config.vocab_size or vocabulary_size, length)
    return size


# The built-in transformer -----------------------------------------------------------------------------------------

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
