"""The families of `model.name`, and what a model's config must satisfy and how large it is. Without torch: known before any process starts."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

from pipetrain.config.problem import choice_error
from pipetrain.config.records import ModelConfig
from pipetrain.config.schema import check_limits


@dataclass(frozen=True)
class ModelFamily:
    """Where a family's functions are, each as `module:function`: a login node plans and has no torch, so each is loaded when it is used.

    check: `(ModelConfig) -> None` raises ValueError where the config describes no model of the family; without torch.
    size: `(ModelConfig, vocabulary_size or None, sequence_length) -> ModelSize`; without torch, of a config that was checked.
    spec: `(ModelConfig, vocabulary_size) -> ModelSpec`.
    longest: `(ModelConfig) -> tokens of the longest sample`, or None where it is not known; without torch, of a config that was checked.
    """

    check: str
    size: str
    spec: str
    longest: str = "pipetrain.models.arithmetic:longest_sample"


_TRANSFORMER = ModelFamily(
    check="pipetrain.models.arithmetic:check_heads",
    size="pipetrain.models.arithmetic:transformer_size",
    spec="pipetrain.models.transformer:transformer_spec",
)
_HUGGING_FACE = ModelFamily(
    check="pipetrain.models.hf.hf_size:check_hf",
    size="pipetrain.models.hf.hf_size:hf_size",
    spec="pipetrain.models.hf.hf_spec:hf_spec",
    longest="pipetrain.models.hf.hf_size:longest_hf_sample",
)
MODEL_FAMILIES = {"llama": _TRANSFORMER, "gpt2": _TRANSFORMER, "hf": _HUGGING_FACE}


def family_of(config: ModelConfig) -> ModelFamily:
    """The row of `model.name`. Raises ValueError: there is none."""
    if config.name not in MODEL_FAMILIES:
        raise choice_error("model.name", config.name, MODEL_FAMILIES)
    return MODEL_FAMILIES[config.name]


def load_function(place: str) -> Any:
    """The function at `module:function`."""
    return pkgutil.resolve_name(place)


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
    size = config.vocab_size
    if size is not None and vocabulary_size is not None and size < vocabulary_size:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the tokenizer's {vocabulary_size}: "
            f"leave it out, or set model.vocab_size={vocabulary_size} or more"
        )


def _too_long(config: ModelConfig, sequence_length: int, longest: int) -> str:
    if config.path is not None:
        return (
            f"data.sequence_length={sequence_length} is longer than the {longest} positions that model.path={config.path} was made for: set "
            f"data.sequence_length={longest} or less"
        )
    return (
        f"data.sequence_length={sequence_length} is longer than model.max_position_embeddings="
        f"{longest}: set model.max_position_embeddings={sequence_length}, or shorter samples"
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
    length = sequence_length or load_function(family.longest)(config) or config.max_position_embeddings
    size: ModelSize = load_function(family.size)(config, config.vocab_size or vocabulary_size, length)
    return size
